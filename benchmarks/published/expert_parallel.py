"""What changes of a counted model with experts in the systems of published rows.

Where the GPUs of a node share out the experts of each layer, each of them has its part of these, and all of
the rest. Experts are evenly used.
"""

from __future__ import annotations

from dataclasses import fields, replace

from megatrain.layout.block_bytes import BlockBytes
from megatrain.model.profile.anatomy import Anatomy, Cost, Layer


def expert_params(anatomy: Anatomy, num_experts: int, top_k: int) -> float:
    """Return the parameters of the experts of one layer, in a model whose layers all have some.

    They follow from the parameters that a token passes: of the experts, `top_k` of `num_experts`.
    """
    idle = anatomy.num_params - anatomy.num_active_params
    return idle / (1 - top_k / num_experts) / len(anatomy.layers)


def own_share(anatomy: Anatomy, experts_of_layer: float, ways: int) -> float:
    """Return which part of a layer's parameters a GPU has, where so many GPUs share out its experts."""
    whole = anatomy.layers[0].num_params
    return (whole - experts_of_layer * (1 - 1 / ways)) / whole


def with_own_share(anatomy: Anatomy, share: float) -> Anatomy:
    """Return the model with layers of which a GPU has so large a part; what it computes is as much."""
    return replace(anatomy, layers=tuple(_with_own_share(layer, share) for layer in anatomy.layers))


def _with_own_share(layer: Layer, share: float) -> Layer:
    fragments = tuple(
        replace(
            fragment,
            num_params=round(fragment.num_params * share),
            sizes=BlockBytes(
                **{
                    each.name: round(getattr(fragment.sizes, each.name) * share)
                    for each in fields(BlockBytes)
                }
            ),
        )
        for fragment in layer.fragments
    )
    return replace(layer, fragments=fragments)


def with_windows(anatomy: Anatomy, share: float) -> Anatomy:
    """Return the model with so large a part of its attention's FLOPs, which windows leave."""

    def windowed(cost: Cost) -> Cost:
        return replace(cost, attention_flops=cost.attention_flops * share)

    layers = tuple(
        replace(layer, forward=windowed(layer.forward), backward=windowed(layer.backward))
        for layer in anatomy.layers
    )
    whole = sum(layer.forward.attention_flops for layer in anatomy.layers) * (1 - share)
    less = 3 * whole / anatomy.tokens  # of a model's FLOPs, the backward of attention has two of three parts
    return replace(anatomy, layers=layers, model_flops_per_token=anatomy.model_flops_per_token - less)
