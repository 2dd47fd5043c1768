"""How calls of the model come in."""
