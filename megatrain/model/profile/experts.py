"""Experts that may come apart into chunks, as a count sees them: beside them, and in their smallest parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

from megatrain.layout.blocks import BlockLayout
from megatrain.model.blocks import Block, find_blocks, group_layers, num_chunks
from megatrain.model.expert_numbers import experts_of as numbers_of_experts
from megatrain.model.experts.apart import Experts, experts_of
from megatrain.model.experts.products import Routed, beside_of
from megatrain.model.experts.whole import why_whole
from megatrain.model.layouts import lay_out_blocks
from megatrain.model.profile.anatomy import ExpertsPart, Fragment, Layer
from megatrain.model.profile.cost import Cost
from megatrain.model.profile.fragments import fragment

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _LeftOut(torch.autograd.Function):
    """Stands for experts: saves what those in chunks save, and returns something of the right size."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden, weights, *others = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weights), None, None, *(None for _ in others)


@contextmanager
def experts_left_out(experts: Experts) -> Iterator[None]:
    """Let a layer run without computing its experts."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        _, extras = beside_of(experts, {})
        routed = Routed.of(hidden, chosen, weights, extras)
        found: Tensor = _LeftOut.apply(routed.hidden, routed.weights, *routed.saved)
        return found

    with mock.patch.object(experts.module, "forward", forward):
        yield


@dataclass(frozen=True, slots=True)
class ExpertsApart:
    """A layer whose experts have come apart as far as they can."""

    experts: Experts
    number: int
    """Experts of a layer."""
    least_chunk: int
    """The number of which a chunk has a multiple."""
    choices: int
    """Experts of a token."""
    beside_bytes: int
    """Bytes of the small weights beside the matrices."""
    blocks: Mapping[str, tuple[Block, BlockLayout]]
    """What is beside them (`main`), the smallest parts of the two matrices (`first` and `second`), and what
    runs behind them (`behind`), if anything does."""

    def described(self, beside: Layer) -> ExpertsPart:
        """Describe the experts of a layer that was counted without them, whose fragments are left out."""
        (first, first_layout), (second, second_layout) = self.blocks["first"], self.blocks["second"]
        shapes = [next(iter(block.parameters.values())).shape for block in (first, second)]
        turn = -1 if self.experts.module.is_transposed else 1
        (outer, between), (inner, _) = (shape[1:][::-turn] for shape in shapes)
        width = next(iter(first_layout.entries)).dtype.itemsize
        main, behind = self._fragment("main"), self._fragment("behind")
        assert main is not None
        own = main.num_params / max(1, main.num_params + (0 if behind is None else behind.num_params))
        return ExpertsPart(
            number=self.number,
            least_chunk=self.least_chunk,
            first=first_layout.sizes,
            second=second_layout.sizes,
            first_params=first_layout.num_parameters,
            second_params=second_layout.num_parameters,
            rows=beside.boundary_bytes // (outer * width) * self.choices,
            widths=(outer, between, inner),
            main=replace(main, forward=beside.forward.scaled(own)),
            behind=behind and replace(behind, forward=beside.forward.scaled(1 - own)),
            saves_output=self.blocks["main"][0].keeps_experts_output,
            beside_bytes=self.beside_bytes,
            beside=beside,
        )

    def _fragment(self, name: str) -> Fragment | None:
        if name not in self.blocks:
            return None
        return replace(fragment(*self.blocks[name], "layer", Cost()), name="")


def experts_apart(
    model: PreTrainedModel, precision: Literal["fp32", "bf16"]
) -> tuple[dict[nn.Module, ExpertsApart], str]:
    """Find the layers of a model whose experts may come apart, or why there are none.

    Args:
        model: The model, outside of any fake mode.
        precision: The precision in which weights are kept.
    """
    numbers, layers = numbers_of_experts(model.config), _layers(model)
    if not any(experts_of(layer) is not None for layer in layers):
        return {}, why_whole(layers)
    if numbers is None:
        return {}, "its configuration does not say how many experts a token has, which a plan needs"
    blocks = find_blocks(model, expert_chunks=sys.maxsize)
    layouts = lay_out_blocks(model, blocks, splits=precision == "bf16")
    found = {}
    for group in group_layers(blocks):
        chunks, module = num_chunks(blocks, group), blocks[group[0]].module
        experts = None if module is None or not chunks else experts_of(module)
        if module is None or experts is None:
            continue
        *_, first, second = group[: 1 + 2 * chunks]  # the first chunk, which is not cut short
        names = {"main": group[0], "first": first, "second": second}
        names.update(zip(["behind"], group[1 + 2 * chunks :], strict=False))
        parts = {name: (blocks[number], layouts[number]) for name, number in names.items()}
        found[module] = ExpertsApart(
            experts, experts.number, experts.least_chunk, numbers[1], _small_bytes(experts), parts
        )
    return found, "" if found else why_whole(layers)


def _small_bytes(experts: Experts) -> int:
    _, extras = beside_of(experts, {})
    return sum(extra.nbytes for extra in extras)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [block.module for block in find_blocks(model) if block.module is not None]
