"""Position-wise modules in tiles: a few thousand tokens of a row at a time, forward and backward.

What a module keeps for its backward is its input alone. The backward runs each tile again, and takes its
gradient: what is inside of the module, such as the wide activations of an MLP, is there for one tile. Outputs
and gradients of inputs are those of the whole row. Gradients of weights add up over tiles in fp32, in the
order of the tiles, so their last bits depend on the tiles' length.

A norm whose output nobody else reads passes with the module: its own output is there for one tile, too.

Source: the chain rule cut over tokens, as in StreamBP (Luo et al., 2025) and ALST's tiled MLP (Bekman et al.,
2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.model.selective import kept_by_none
from megatrain.model.tiles.calls import TiledCall, Uses, called
from megatrain.model.tiles.kept import Stored


class Tiled:
    """Stands for the forward of a position-wise module."""

    def __init__(
        self,
        module: nn.Module,
        tokens: int,
        inner: Callable[[Tensor], Tensor],
        *,
        uses: int = 1,
        before: nn.Module | None = None,
    ) -> None:
        """Prepare; the module is not changed.

        Args:
            module: A module that computes each token of one tensor by itself (`position_wise_modules`).
            tokens: The tokens of a tile.
            inner: What a tile runs through: the module's own forward, or a compiled one, and `before`'s.
            uses: How often the module uses its input, if others use it too. Autograd adds the gradients of
                so many uses to those of others one by one, and so they are handed to it one by one.
            before: The norm that a tile passes first; None: none does.
        """
        self.modules = [module] if before is None else [before, module]
        self.tokens, self.inner, self.uses = tokens, inner, uses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module of (rows, tokens, ...)."""
        hidden = self.long(args, kwargs)
        return self.inner(*args, **kwargs) if hidden is None else called(self.call(hidden), hidden)

    def long(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the only argument of a call, if it is of rows longer than a tile; else None."""
        given = [*args, *kwargs.values()]
        is_hidden = len(given) == 1 and isinstance(given[0], Tensor) and given[0].dim() > 2
        return given[0] if is_hidden and given[0].shape[1] > self.tokens else None

    def call(self, hidden: Tensor) -> TiledCall:
        """Return what computes a call with such rows."""
        return _Call(self.modules, self.tokens, self.uses, hidden, self.inner)


class _Call(TiledCall):
    """One call."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tokens: int,
        uses: int,
        hidden: Tensor,
        inner: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(modules, tokens, uses, hidden)
        self._inner = inner

    def compute(self, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the module's output, tile by tile, and nothing beside it."""
        found: Tensor | None = None
        with kept_by_none(), torch.no_grad():
            for tile in self.tiles(hidden):
                part = self._inner(hidden[:, tile].contiguous())
                if found is None:
                    found = part.new_empty((*hidden.shape[:2], *part.shape[2:]))
                found[:, tile] = part
        assert found is not None
        return found, []

    def go_back(self, hidden: Stored, gradient: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> None:
        """Run each tile again, and take its gradient."""
        for tile in self.tiles(hidden):
            part = hidden.rows(tile).detach().contiguous().requires_grad_(self.wants_input)
            apart = Uses(part) if self.wants_input and self.uses > 1 else None
            with apart or nullcontext():
                out = self._inner(part)
            self.take([out], [gradient[:, tile].contiguous()], part, apart, leaves, tile)
            del out, part, apart
