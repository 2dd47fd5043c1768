"""Readers turn rows of files, hub data sets and mixtures into examples; `examples` is the entry."""
