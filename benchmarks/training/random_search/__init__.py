"""A random search for runs in which streaming differs from a resident model; see `__main__.py`."""
