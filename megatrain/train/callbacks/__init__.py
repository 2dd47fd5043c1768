"""Callbacks of transformers' Trainer, called by a run: trackers such as TensorBoard, and a user's own."""
