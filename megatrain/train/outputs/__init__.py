"""Results of a run: its model as files, on the hub, and as text."""
