"""The objectives of a run and the rows that they need, one file for each objective."""
