"""The batches of a trainer's steps and loops, run together although it asks for one after the other."""
