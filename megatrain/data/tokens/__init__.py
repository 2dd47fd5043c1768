"""Examples to token ids, each with a flag that says whether it is trained on."""
