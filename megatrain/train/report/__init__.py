"""Reports of a run: its events as they come, its page, tables of several runs, its model card."""
