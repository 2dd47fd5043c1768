"""Whole training runs: losses, bits and time of streamed steps."""
