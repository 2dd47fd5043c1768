"""The way in which each layer runs: what the choice says, and the engine's own exceptions from it."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.choice import Choice
from megatrain.config.policies import POLICIES, Policy
from megatrain.layout import pools
from megatrain.layout.host_buffers import LEAST_OFFLOADED_BYTES
from megatrain.model.profile.anatomy import Anatomy, LateBytes, Layer
from megatrain.plan.memory.block_sums import BlockSums


@dataclass(frozen=True, slots=True)
class LayerRun:
    """The way in which a layer runs, and what of a visit leaves the device after its forward."""

    policy: Policy
    """The policy that says what stays of it. The last layer, needed first, sends nothing to the host, but for
    one that comes back late."""
    is_dropped: bool = False
    """Its boundary is made again by the layers before."""
    is_boundary_on_host: bool = False
    """Its boundary leaves the device, with what else is kept for its recomputation and waits there: not the
    last one's, nor a small one."""
    late: LateBytes | None = None
    """Its memory if what left the device comes back late, a part at a time; None: it comes ahead, at once."""
    leaving_bytes: int = 0
    """Copied to the host, and back."""
    host_bytes: int = 0
    """Room that this takes on the host, or on drives before it is cut into chunks."""


def layer_runs(anatomy: Anatomy, choice: Choice) -> tuple[LayerRun, ...]:
    """Say for each layer of a model how it runs: once for choices that run their layers alike."""
    alike = BlockSums.of(anatomy, choice).runs
    key = (choice.activations, choice.boundaries)
    if key not in alike:
        alike[key] = _runs(anatomy, choice)
    return alike[key]


def _runs(anatomy: Anatomy, choice: Choice) -> tuple[LayerRun, ...]:
    layers = anatomy.layers_of(choice)
    last = len(layers) - 1
    known: dict[tuple[int, str, bool, bool], LayerRun] = {}
    runs = []
    kinds = BlockSums.of(anatomy, choice).kinds
    for number, (kind, policy) in enumerate(zip(kinds, choice.activations, strict=True)):
        key = (kind, policy, number == 0, number == last)
        if key not in known:
            known[key] = _run(layers[number], choice, number, is_last=number == last)
        runs.append(known[key])
    return tuple(runs)


def _run(layer: Layer, choice: Choice, number: int, *, is_last: bool) -> LayerRun:
    policy = POLICIES[choice.activations[number]]
    if policy.drops(number):
        return LayerRun(policy, is_dropped=True)
    late = layer.late.get(policy.name) if layer.boundary_bytes >= LEAST_OFFLOADED_BYTES else None
    if (is_last and late is None) or not policy.leaves_device(number, choice.boundaries):
        return LayerRun(POLICIES[policy.counted_as] if policy.is_offloaded else policy)
    if policy.is_offloaded:
        return LayerRun(
            policy, leaving_bytes=layer.offload_copied_bytes, host_bytes=layer.saved_bytes[policy.name]
        )
    if layer.boundary_bytes < LEAST_OFFLOADED_BYTES:
        return LayerRun(policy)
    kept = [nbytes for nbytes in layer.kept_sizes if nbytes >= LEAST_OFFLOADED_BYTES]
    sizes = [layer.boundary_bytes, *kept]
    return LayerRun(
        policy,
        is_boundary_on_host=True,
        late=late,
        leaving_bytes=sum(sizes) + layer.results_copied_bytes.get(policy.name, 0),
        host_bytes=pools.saved_visit(sizes) + layer.results_room_bytes.get(policy.name, 0),
    )
