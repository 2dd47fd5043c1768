"""Keep the exact state of a run in directories that are whole or absent, never torn.

`save` writes one, `load` finds the newest whole one; `format` says what is in it, `rng` turns generator
states into plain values, and `files` holds the only calls into the operating system that change a file.
"""
