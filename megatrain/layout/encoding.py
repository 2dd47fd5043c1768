"""Weights that stay as their checkpoint has them, in codes and scales, and become values on the device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.layout.decoding import decoded_numel

PART_ALIGNMENT = 256
"""Bytes at a multiple of which each part of an encoded weight starts."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that an encoded weight is made of, such as its codes or its scales."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Return the bytes from its start to that of the next one."""
        return -(-self.nbytes // PART_ALIGNMENT) * PART_ALIGNMENT


class Scratch:
    """Memory for the tensors of one piece after the other."""

    def __init__(self, flat: Tensor) -> None:
        """Use (N,) uint8, aligned to `PART_ALIGNMENT`."""
        self._flat = flat
        self._start = 0

    @property
    def numel(self) -> int:
        """Return how many values it is for."""
        return decoded_numel(self._flat.numel())

    def begin(self) -> None:
        """Begin a piece: the tensors of the one before are not used any more."""
        self._start = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose values are anything."""
        part = Part(shape, dtype)
        flat = self._flat[self._start : self._start + part.nbytes]
        self._start += part.room
        return flat.view(dtype).view(shape)


class Encoding(ABC):
    """How one weight is encoded. Two are equal if the same bytes are the same values."""

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, Part]:
        """The tensors of the weight by name, in the order in which they are kept."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], out: Tensor, scratch: Scratch) -> None:
        """Write the values of the weight, each rounded once to bf16; take no other memory than the scratch's.

        Args:
            parts: The tensors of `parts`, on any device.
            out: The weight's place there, in its shape; bfloat16 or float32.
            scratch: Memory there, which says how many values are decoded in one go.
        """

    def prepare(self, device: torch.device) -> None:  # noqa: B027 (most have no tables)
        """Make the tables on a device that `decode` looks values up in: it must allocate nothing there."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts, padding included."""
        return sum(part.room for part in self.parts.values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """View the parts in (nbytes,) uint8."""
        views, start = {}, 0
        for name, part in self.parts.items():
            views[name] = flat[start : start + part.nbytes].view(part.dtype).view(part.shape)
            start += part.room
        return views
