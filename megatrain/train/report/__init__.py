"""What is told of a run: its events as they come, its report, tables of several runs, its model card."""
