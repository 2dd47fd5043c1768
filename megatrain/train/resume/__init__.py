"""What a checkpoint or a commit holds of a run, and what has changed since."""
