"""The model of a trainer: in which precision and by which engine it is trained, and what is saved of it."""
