"""Training runs: the loop, its records and displays, and the commands built on it."""
