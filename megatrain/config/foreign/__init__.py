"""Settings of other trainers, translated into ours: the meaning of each key, or why it has none."""
