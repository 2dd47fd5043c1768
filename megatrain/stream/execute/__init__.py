"""Runs the operations of a program: slots, gradients, state, updates."""
