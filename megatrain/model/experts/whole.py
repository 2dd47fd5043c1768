"""Why the experts of a model stay in one piece, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatrain.model.experts.apart import IMPLEMENTATION, Experts, fused_experts
from megatrain.model.weights.kept import encoding_of


def why_whole(layers: Sequence[nn.Module]) -> str:
    """Return why experts do not come apart in any of these layers, of which `find_blocks` found none that do.

    Args:
        layers: The decoder layers of a model.

    Returns:
        A clause without a full stop.
    """
    found = [(layer, experts) for layer in layers for experts in fused_experts(layer)]
    if not found:
        own = next((type(layer).__name__ for layer in layers if _has_experts(layer)), None)
        if own is None:
            return "no layer of the model has experts"
        return f"{own} runs its experts by code of its own, not through transformers' interface for them"
    layer, experts = found[0]
    name, running = type(layer).__name__, experts.module.config._experts_implementation
    if any(encoding_of(matrix) is not None for matrix in _matrices(experts)):
        return (
            "the experts are kept in the codes of their checkpoint (lora.base=as_stored), which are decoded "
            "layer by layer: the two exclude each other"
        )
    if running != IMPLEMENTATION:
        return f"the experts of {name} run as {running}, and those that come apart as {IMPLEMENTATION}"
    if experts.least_chunk >= experts.number:
        return (
            f"the experts of {name} are small: a chunk of whole pages of memory has {experts.least_chunk} of "
            f"them, and a layer {experts.number}"
        )
    return f"what {name} does beside its experts does not let them come apart"


def _matrices(experts: Experts) -> list[nn.Parameter]:
    return [experts.module.get_parameter(name) for name in experts.matrices]


def _has_experts(layer: nn.Module) -> bool:
    named = (f"{name} {type(module).__name__}" for name, module in layer.named_modules() if name)
    return any("expert" in each.lower() for each in named)
