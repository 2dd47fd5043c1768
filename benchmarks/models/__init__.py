"""The families that are known to train: checked from file to file, and written as `docs/models.md`."""
