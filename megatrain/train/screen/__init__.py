"""The display of a run: its slow operations, the lines before the first step, and progress."""
