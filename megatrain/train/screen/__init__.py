"""What a user sees of a run: what takes its time, the lines before the first step, progress."""
