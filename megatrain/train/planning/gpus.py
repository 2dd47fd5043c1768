"""Several GPUs and nodes: their number in a machine, and the planner's request for each rank of a run."""

from __future__ import annotations

from dataclasses import replace

from megatrain.config.choice import part_of
from megatrain.config.runs import require_power_of_two
from megatrain.errors import ConfigError
from megatrain.hardware import HardwareSpec
from megatrain.plan.search.request import Request


def with_gpus(spec: HardwareSpec, gpus: int | None, nodes: int | None) -> HardwareSpec:
    """Return `nodes` nodes like a machine, with `gpus` GPUs each.

    Args:
        spec: The machine.
        gpus: The number of GPUs of each node; None takes all of the machine.
        nodes: The number of nodes; None takes that of the machine.

    Raises:
        ConfigError: There are too few GPUs, no network, or the number of all GPUs is no power of two.
    """
    gpus, nodes = gpus or spec.num_gpus, nodes or spec.num_nodes
    if spec.is_cpu and gpus * nodes > 1:
        raise ConfigError(
            f"--gpus is {gpus} and --nodes {nodes}, but on {spec.name} the host computes, and ranks share "
            "its cores: they are planned where they run (megatrain train --ranks)"
        )
    if gpus > spec.num_gpus:
        raise ConfigError(
            f"--gpus is {gpus}, but {spec.name} has {spec.num_gpus}; use at most that, or a machine file "
            "with more (num_gpus)"
        )
    if nodes > 1 and spec.network_bytes_per_s is None:
        raise ConfigError(
            f"--nodes is {nodes}, but nothing is known of a network of {spec.name}; give a machine file with "
            "network_bytes_per_s, or --nodes 1"
        )
    all_of_them = (
        f"--gpus is {gpus}" if nodes == 1 else f"{nodes} nodes of {gpus} GPUs are {gpus * nodes} GPUs"
    )
    require_power_of_two(gpus * nodes, all_of_them)
    return spec.with_ranks(gpus, nodes)


def of_ranks(request: Request, num_ranks: int, num_nodes: int = 1, *, gathers: bool | None = None) -> Request:
    """Return the request for each of several ranks, from the request for all of them.

    Args:
        request: The request, with the batch of all ranks' step.
        num_ranks: The number of ranks that train together.
        num_nodes: The number of nodes on which they are.
        gathers: Whether ranks of a node gather weights; None means where its devices reach each other.

    Raises:
        ConfigError: The ranks cannot do what is decided, or the batch cannot be shared out.
    """
    if num_ranks == 1:
        return request
    spec, batch = request.spec, request.batch
    if not spec.is_cpu:  # ranks of a CPU are measured with the cores that each has
        spec = spec.with_ranks(num_ranks // num_nodes, num_nodes)
    if gathers is None:
        gathers = spec.num_gpus > 1 and spec.peer_bytes_per_s is not None
    choice, part = part_of(num_ranks, request.choice, batch, num_nodes=num_nodes, gathers=gathers)
    assert part is not None
    return replace(request, spec=spec, choice=choice, batch=part)
