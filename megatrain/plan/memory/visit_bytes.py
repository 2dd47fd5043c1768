"""How a layer runs under a choice, where that is not what the choice says: the engine's own exceptions."""

from __future__ import annotations

from megatrain.config.choice import Choice
from megatrain.layout import pools
from megatrain.layout.host_buffers import LEAST_OFFLOADED_BYTES
from megatrain.model.profile.anatomy import Anatomy


def policy_of(anatomy: Anatomy, choice: Choice, number: int) -> str:
    """Return how a layer runs: what the last one would send to the host is needed first, and stays."""
    policy = choice.activations[number]
    return "keep" if policy == "offload" and number == len(anatomy.layers) - 1 else policy


def is_boundary_on_host(anatomy: Anatomy, choice: Choice, number: int) -> bool:
    """Whether a layer's boundary leaves the device: not the last one's, nor a small one."""
    layer, policy = anatomy.layers[number], choice.activations[number]
    return (
        choice.boundaries != "device"
        and number < len(anatomy.layers) - 1
        and policy in ("recompute", "recompute_cheap", "drop_boundary")
        and not is_dropped(choice, number)
        and layer.boundary_bytes >= LEAST_OFFLOADED_BYTES
    )


def visit_bytes(anatomy: Anatomy, choice: Choice, number: int) -> int:
    """Return the bytes on the host, or on drives, of what leaves the device after a layer's forward."""
    layer = anatomy.layers[number]
    if policy_of(anatomy, choice, number) == "offload":
        return layer.saved_bytes["offload"]
    if is_boundary_on_host(anatomy, choice, number):
        return pools.saved_visit([layer.boundary_bytes])
    return 0


def is_dropped(choice: Choice, number: int) -> bool:
    """Whether a layer's boundary is made again; that of the first one cannot be."""
    return choice.activations[number] == "drop_boundary" and number > 0
