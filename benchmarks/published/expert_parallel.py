"""What changes of a counted model with experts in the systems of published rows.

Where the GPUs of a node share out the experts of each layer, each of them has its part of these, and all of
the rest. Experts are evenly used.

Before its experts compute, a GPU sends tokens to those that have them (dispatch), and gets what they make of
these back (combine); the backward does the same with gradients. Nothing computes meanwhile.
Sources: 2 (1 - 1/n) top_k hidden bytes of a token and pass: Lepikhin et al., "GShard", 2020, section 3; once
for each GPU that has one of its experts: deepseek-ai/DeepEP, its kernels for training.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import comb

from megatrain.layout.block_bytes import BlockBytes
from megatrain.model.profile.anatomy import Anatomy, Layer
from megatrain.model.profile.cost import Cost


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


def sent_tokens(num_experts: int, top_k: int, ways: int, *, is_once: bool) -> float:
    """Return how many times a GPU sends a token, on average, where so many GPUs share out the experts.

    Args:
        num_experts: The experts of a layer.
        top_k: The experts of a token.
        ways: The GPUs that have them, as many each.
        is_once: Whether a token goes once to each GPU that has some of its experts; else once for each
            expert that another GPU has.
    """
    if not is_once:
        return top_k * (1 - 1 / ways)
    missed = comb(num_experts - num_experts // ways, top_k) / comb(num_experts, top_k)
    return (ways - 1) * (1 - missed)


def with_exchange(anatomy: Anatomy, nbytes: float) -> Anatomy:
    """Return the model with layers in which a dispatch sends so many bytes, and a combine as many.

    A forward has one of both, and so has a backward.
    """

    def exchanging(cost: Cost) -> Cost:
        return replace(cost, swapped_bytes=cost.swapped_bytes + 2 * nbytes)

    layers = tuple(
        replace(layer, forward=exchanging(layer.forward), backward=exchanging(layer.backward))
        for layer in anatomy.layers
    )
    return replace(anatomy, layers=layers)


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
