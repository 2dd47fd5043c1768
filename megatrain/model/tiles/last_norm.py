"""The norm behind the last layer: long rows pass it with the chunks of the head.

Its output is there for one chunk of tokens. What stays of it from the forward of head and loss to their
backward are its input and the gradient of its output, in whose place the gradient of its input comes, tile by
tile. Tiles, and all results, are those of the norm by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megatrain.model.selective import kept_by_none
from megatrain.model.tiles.kept import Whole
from megatrain.model.tiles.tiled import Tiled

Handing: TypeAlias = tuple[torch.dtype | None, Tensor | None]
"""What of a norm belongs to a micro-batch that others run beside."""


class LastNorm(Tiled):
    """Stands for the forward of a norm whose output is what a decoder returns (`Part.is_last`)."""

    def __init__(self, module: nn.Module, tokens: int, inner: Callable[[Tensor], Tensor]) -> None:
        """Prepare; the module is not changed. See `Tiled`."""
        super().__init__(module, tokens, inner)
        self._hands_on: torch.dtype | None = None
        """The dtype of rows that are handed on; None: none are."""
        self._handed: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the norm, or hand long rows on to who runs it on chunks of them."""
        hidden = None if self._hands_on is None else self.long(args, kwargs)
        if hidden is None or not self._hands_on == hidden.dtype == self.part(hidden[:, :1]).dtype:
            return super().__call__(*args, **kwargs)
        self._handed = hidden
        return hidden

    @contextmanager
    def handing_on(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Hand long rows on for as long as the context lasts; `take` says which these are.

        Args:
            dtype: The dtype in which the head computes; None: no rows are. What is in another one, before the
                norm or behind it, the decoder casts, which a small model in fp32 does not show.
        """
        self._hands_on = dtype
        try:
            yield
        finally:
            self._hands_on = None

    def take(self) -> Tensor | None:
        """Return the rows that were handed on since the last call; None: none were."""
        handed, self._handed = self._handed, None
        return handed

    def put_away(self) -> Handing:
        """Take out what belongs to the micro-batch that is running."""
        kept = self._hands_on, self._handed
        self._hands_on, self._handed = None, None
        return kept

    def put_back(self, kept: Handing) -> None:
        """Put in place what `put_away` returned."""
        self._hands_on, self._handed = kept

    def part(self, rows: Tensor) -> Tensor:
        """Compute the norm of some tokens, without a graph: (rows, tokens, width)."""
        with kept_by_none(), torch.no_grad():
            return self.inner(rows)


class NormOfChunks:
    """One call of the norm, in chunks: rows that were handed on."""

    def __init__(self, norm: LastNorm, hidden: Tensor) -> None:
        """Take note of the weights that the norm has now.

        Args:
            norm: The norm.
            hidden: What it handed on: (rows, tokens, width).
        """
        self.part = norm.part
        self._call = norm.call(hidden)
        self._call.hidden, self._call.is_in_place = None, True
        self._shape = hidden.shape
        self.weights: Sequence[Tensor] = self._call.weights
        """The weights of the norm, from which autograd goes on."""

    def go_back(
        self, hidden: Tensor, gradient: Tensor, weights: Sequence[Tensor], wants: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return the gradients of the rows and of the weights, each of which is None if it is not wanted.

        Args:
            hidden: The rows, in any shape.
            gradient: That of the norm's output, in the shape of `hidden`, to be written over.
            weights: `weights`, as they were kept.
            wants: Whether gradients are wanted: of the rows, and of each weight.
        """
        self._call.gradient = gradient.view(self._shape)
        of_hidden, *of_weights = self._call.gradients(Whole(hidden.view(self._shape)), weights, wants)
        return None if of_hidden is None else of_hidden.view(hidden.shape), of_weights


def last_norm(decoder: nn.Module) -> LastNorm | None:
    """Return what stands for the norm behind a decoder's last layer; None: rows pass it as they pass any."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList):
            continue  # its layers
        forward = child.__dict__.get("forward")
        found = forward if isinstance(forward, LastNorm) else last_norm(child)
        if found is not None:
            return found
    return None
