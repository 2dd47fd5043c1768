"""A training step as a list of operations."""
