"""Adapters: what of a model is trained, and how PEFT's modules stream."""
