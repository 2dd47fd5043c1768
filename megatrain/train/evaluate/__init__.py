"""Evaluation during a run: losses on held-out data, the best checkpoint, early stops, continued texts."""
