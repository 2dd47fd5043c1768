"""The plan of a run, which is made, obeyed, and compared with measurements."""
