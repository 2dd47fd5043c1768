"""Choices, the fastest that fits, and what to do if none does."""
