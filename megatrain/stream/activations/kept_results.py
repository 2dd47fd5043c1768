"""Results of a layer's operations that are kept for its recomputation, where the layer's input waits.

They leave the device with the input, in one copy, and come back with it: nothing else says when.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.activations.saved_tensors import Held


@dataclass(slots=True)
class Waiting:
    """A tensor that leaves the device with what its visit saves."""

    held: Held
    offloaded: OffloadedActivations

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into it while it was on the device."""
        return self.held.tensor is None or self.held.is_intact

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.held.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.held.dtype

    def load(self) -> Tensor:
        """Return it on the device; compute waits for its copy."""
        return self.offloaded.load(self.held)

    def rows(self, tile: slice) -> Tensor:
        """Return some tokens of it on the device; compute waits for their copy."""
        return self.offloaded.rows(self.held, tile)


def saving(offloaded: OffloadedActivations, key: Hashable) -> Callable[[Tensor], Waiting]:
    """Return a function that keeps a tensor among what a visit saves.

    Args:
        offloaded: The activations that wait elsewhere.
        key: The key of the visit, which is not flushed yet.
    """

    def save(tensor: Tensor) -> Waiting:
        return Waiting(offloaded.save(tensor, key), offloaded)

    return save
