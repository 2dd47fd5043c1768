"""The plan of a run: made, obeyed, compared with what was seen."""
