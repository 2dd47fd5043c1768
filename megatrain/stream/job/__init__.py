"""The job for which a model is streamed, and the ranks that do it together."""
