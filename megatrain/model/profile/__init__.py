"""The cost of a model, which is counted on fake tensors, traced and timed."""
