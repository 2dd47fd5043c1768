"""Results of a layer's operations that are kept for its recomputation, where the layer's input waits.

They leave the device with the input, in one copy, and come back with it: nothing else says when.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from megatrain.model.selective import Saved
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.activations.saved_tensors import Held


@dataclass(slots=True)
class _Waiting:
    """A tensor that leaves the device with what its visit saves."""

    held: Held
    offloaded: OffloadedActivations

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into it while it was on the device."""
        return self.held.tensor is None or self.held.is_intact

    def load(self) -> Tensor:
        """Return it on the device; compute waits for its copy."""
        return self.offloaded.load(self.held)


def saving(offloaded: OffloadedActivations, key: Hashable) -> Callable[[Tensor], Saved]:
    """Return a function that keeps a tensor among what a visit saves.

    Args:
        offloaded: The activations that wait elsewhere.
        key: The key of the visit, which is not flushed yet.
    """

    def save(tensor: Tensor) -> Saved:
        return _Waiting(offloaded.save(tensor, key), offloaded)

    return save
