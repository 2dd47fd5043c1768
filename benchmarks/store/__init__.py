"""Drives, and the split of masters."""
