"""The blocks of a model as a plan sees them: their kind, their sizes and their work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatrain.layout.block_bytes import aligned
from megatrain.layout.blocks import BlockLayout
from megatrain.model.blocks import Block
from megatrain.model.profile.anatomy import Fragment
from megatrain.model.profile.cost import Cost

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fragment(block: Block, layout: BlockLayout, kind: str, forward: Cost) -> Fragment:
    """Describe a fragment, or an outer block, by what its forward costs."""
    return Fragment(
        name=block.name,
        kind=kind,
        num_params=layout.num_parameters,
        sizes=layout.sizes,
        largest_run=largest_run(layout),
        forward=forward,
        may_stream=block.caller is not None,
        is_behind=block.is_behind,
    )


def largest_run(layout: BlockLayout) -> int:
    """Count the elements of the longest run of trained entries with one rule of weight decay."""
    largest = run = 0
    last: tuple[bool, torch.dtype] | None = None
    for entry in layout.trained:
        kind = len(entry.shape) >= 2 and not entry.name.endswith("bias"), entry.dtype
        run = (run if kind == last else 0) + aligned(entry.numel)
        largest, last = max(largest, run), kind
    return largest


def kind_of_fragment(block: Block) -> str:
    """Say what of a layer a block is."""
    if not block.entries:
        return "layer"
    names = block.name.rsplit(".", 1)[-1].lower()
    if any(len(shape) >= 3 for shape in (p.shape for p in block.parameters.values())):
        return "experts"
    return "attention" if "att" in names or "mixer" in names else "mlp"


def kind_of_outer(model: PreTrainedModel, block: Block) -> str:
    """Say what a block is that is in no layer."""
    modules = [site.module for site in block.sites]
    if model.get_input_embeddings() in modules:
        return "embedding"
    return "head" if model.get_output_embeddings() in modules else "other"
