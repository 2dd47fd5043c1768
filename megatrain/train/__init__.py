"""Training runs: the loop, what it records and shows, and the commands built on it."""
