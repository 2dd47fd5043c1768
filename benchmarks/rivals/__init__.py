"""Other trainers on the same computer."""
