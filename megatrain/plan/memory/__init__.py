"""The bytes of every pool."""
