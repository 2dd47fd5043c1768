"""Rows of files, hub data sets and mixtures to examples, every row accounted for; `examples` is the entry."""
