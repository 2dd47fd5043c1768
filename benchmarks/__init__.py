"""Measurements, a folder per subject; in the checkout, `python -m benchmarks.FOLDER.SCRIPT` runs one."""
