"""Rows whose tokens several ranks share out: cut before the model, and whole inside attention (Ulysses)."""
