"""What a model costs: counted on fake tensors, traced and timed."""
