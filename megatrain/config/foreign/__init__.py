"""Settings of other trainers, turned into ours: what each key of theirs means here, or why nothing."""
