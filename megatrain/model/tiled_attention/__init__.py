"""Exact attention of torch's own operations, by tiles of queries and keys, where there is no kernel."""
