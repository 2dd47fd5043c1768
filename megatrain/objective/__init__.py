"""What is learnt, and from which rows: one file for each objective."""
