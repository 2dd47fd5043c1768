"""What of a model `all-linear` leaves without an adapter, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from megatrain.model.blocks import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_NAMES = 4


def left_out(model: PreTrainedModel) -> str:
    """Return a sentence on the experts and linear layers that have no adapter; empty: all have one.

    PEFT puts adapters on linear modules. Experts that are one matrix for all of them are none: PEFT knows the
    families in which it adapts them by a table, which has not all of them, and in whose families the names of
    a dense MLP mean experts only.

    Args:
        model: A model whose linear layers `adapt` has adapted, with weights or without.
    """
    adapted = {id(weight) for weight in _adapted(model)}
    found: dict[str, dict[str, int]] = {"experts": {}, "linear layers": {}}
    for block in find_blocks(model):
        if block.module is None or block.is_beside:
            continue
        for path, module in block.module.named_modules():
            for leaf, weight in module.named_parameters(recurse=False):
                name = f"{path}.{leaf}".replace(".base_layer", "")
                if id(weight) in adapted or weight.requires_grad or "lora_" in name:
                    continue
                is_of_experts = _is_of_experts(name, module, weight)
                if is_of_experts or (isinstance(module, nn.Linear) and leaf == "weight"):
                    kind = found["experts" if is_of_experts else "linear layers"]
                    name = name if is_of_experts else path
                    kind[name] = kind.get(name, 0) + weight.numel()
    sizes = [size for kind in found.values() for size in kind.values()]
    if not sizes:
        return ""
    share = sum(sizes) / sum(weight.numel() for weight in model.parameters())
    parts = [f"{kind} ({_listed(names)})" for kind, names in found.items() if names]
    return (
        f"lora.target_modules=all-linear puts no adapter on {' and '.join(parts)}: PEFT has none for them in "
        f"{type(model).__name__}, and {share:.0%} of its parameters stay without one"
    )


def _is_of_experts(name: str, module: nn.Module, weight: nn.Parameter) -> bool:
    path, _, leaf = name.rpartition(".")
    if "experts" in path.split("."):
        return weight.ndim >= 2 and "bias" not in leaf
    return weight.ndim == 3 and "expert" in type(module).__name__.lower()


def _adapted(model: nn.Module) -> Iterator[nn.Parameter]:
    module: Any
    for module in model.modules():
        if len(getattr(module, "lora_A", ())):
            is_whole = hasattr(module, "parameter_name")
            yield module.get_param() if is_whole else module.get_base_layer().weight


def _listed(names: Mapping[str, int]) -> str:
    some = list(names)[:_MOST_NAMES]
    return ", ".join(some) + (f" and {len(names) - len(some)} more" if len(names) > len(some) else "")
