"""Encodings of quantised weights that a model keeps as they are: how tensors of files make them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from megatrain.layout.decoding import decoding_scratch
from megatrain.layout.encoding import Encoding, Scratch

Region = tuple[int | slice, ...]
"""The place of a tensor in a larger one, which may name fewer dimensions; empty: it is all of that."""


class WeightEncoding(Encoding):
    """The encoding of a weight of a checkpoint, or of one of a model that several of these make."""

    shape: tuple[int, ...]
    """The shape of the values."""

    @abstractmethod
    def of_all(self, shape: tuple[int, ...], regions: Sequence[Region]) -> Self | None:
        """Return the encoding of the weight that several make, all encoded as this one.

        Args:
            shape: The shape of that weight.
            regions: The place of each of them in it.

        Returns:
            The encoding; None: their codes do not fit together, so only the values do.
        """

    @abstractmethod
    def put(self, name: str, place: Tensor, region: Region, tensor: Tensor) -> None:
        """Write a tensor of a file into its place in a part of such a weight, byte for byte.

        Args:
            name: The name of the part.
            place: The part, whole.
            region: The place of the file's weight in the whole one.
            tensor: The tensor.
        """

    def of_file(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the parts of a weight of a file, as they are kept."""
        return parts

    def decoded(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the values of a weight of a file in bf16."""
        made = torch.empty(self.shape, dtype=torch.bfloat16)
        self.decode(self.of_file(parts), made, scratch_of(made))
        return made


_PIECE = 1 << 19
"""Values that are made in one go on the host, where they fit into a cache."""


def scratch_of(out: Tensor) -> Scratch:
    """Return new scratch memory beside a tensor, to decode a weight into it."""
    nbytes = decoding_scratch(max(1, min(out.numel(), _PIECE)))
    return Scratch(torch.empty(nbytes, dtype=torch.uint8, device=out.device))
