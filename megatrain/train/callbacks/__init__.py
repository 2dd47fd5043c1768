"""Callbacks of transformers' Trainer that a run calls: trackers such as TensorBoard, and a user's own."""
