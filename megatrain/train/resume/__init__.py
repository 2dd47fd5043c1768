"""The contents of a run's checkpoint or commit, and the changes since."""
