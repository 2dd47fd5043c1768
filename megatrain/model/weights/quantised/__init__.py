"""Checkpoints whose weights are quantised: what each format says a weight is, in bf16."""
