"""The settings of a run, section by section."""
