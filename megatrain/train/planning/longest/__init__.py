"""The longest row with which a run trains on a machine: how it is found, and how it is printed."""
