"""The model of a trainer: its precision, its engine, and its saved files."""
