"""Commands that are built on the training loop."""
