"""Weights from files, into files, and drawn anew."""
