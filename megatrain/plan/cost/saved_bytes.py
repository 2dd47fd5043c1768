"""The bytes that a run writes at each save, from the counts of its model."""

from __future__ import annotations

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.model.profile.anatomy import Anatomy


def checkpoint_bytes(anatomy: Anatomy, optimizer: Optimizer) -> int:
    """Return the bytes of a checkpoint's tensors: the model, and the optimizer's state."""
    less = DEFAULT.bytes_per_element - optimizer.bytes_per_element  # an anatomy is counted with the usual one
    return anatomy.checkpoint_bytes - round(less * anatomy.num_trained)


def model_bytes(anatomy: Anatomy) -> int:
    """Return the bytes of the part of a checkpoint that an export copies: the model, or its adapters."""
    remainder = 2 * (anatomy.precision == "bf16")
    return anatomy.checkpoint_bytes - round((DEFAULT.bytes_per_element + remainder) * anatomy.num_trained)
