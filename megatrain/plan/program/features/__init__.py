"""Features of a step: each is the kinds of operations that it takes, and its pass over the program."""
