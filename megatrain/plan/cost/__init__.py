"""The seconds of an operation, and of a list of them."""
