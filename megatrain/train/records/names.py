"""Names of numbers in the records of a run that more than one place reads."""

LOSS_AT, TOKENS_AT = "loss/", "tokens/"
"""What stands before the name of a range of positions, in the names of its loss and its number of tokens."""
