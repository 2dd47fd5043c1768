"""Batches of a trainer's steps and loops, which run together although they are asked for one by one."""
