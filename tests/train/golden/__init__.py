"""Checkpoints and settings that an earlier version has written, and what it made of them."""
