"""Plans against what happens: bytes, step times, other choices, changing machines."""
