"""The names of the buffers that operations read and write, from which every wait follows."""

from __future__ import annotations

from typing import TypeAlias

Buffer: TypeAlias = tuple[str, int]
"""A kind and an index: ("slot", 0), ("gradient_buffer", 1), ("working", block), ("gradient", block), ..."""


def weights_buffer(block: int, slot: int) -> Buffer:
    """Name the device buffer with a block's weights: its slot, or its own place if it is resident."""
    return ("slot", slot) if slot >= 0 else ("resident", block)


def gradients_buffer(block: int, gradient_buffer: int) -> Buffer:
    """Name the device buffer with a block's gradients: one of the ring, or its own if it is resident."""
    return ("gradient_buffer", gradient_buffer) if gradient_buffer >= 0 else ("resident_gradient", block)


def waiting_buffer(block: int, waiting: int) -> Buffer:
    """Name the device buffer in which a gradient waits: one for that, or where a resident block's adds up."""
    return ("waiting", waiting) if waiting >= 0 else ("resident_gradient", block)


def home_buffer(block: int, staging: int) -> Buffer:
    """Name the host buffer with a block's gradient: its part of the gradient plane, or a staging buffer."""
    return ("staging", staging) if staging >= 0 else ("gradient", block)
