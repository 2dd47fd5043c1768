"""The records that a run writes beside its model: its directory, metrics and events."""
