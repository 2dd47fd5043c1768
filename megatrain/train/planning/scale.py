"""The growth of speed with the number of GPUs, by plans for 1 to 1,024 of them with the same tokens each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatrain.config.choice import StepBatch
from megatrain.config.plan import Plan
from megatrain.config.sizes import binary
from megatrain.hardware import HardwareSpec
from megatrain.plan.search.planner import make_plan, plan_with_open_runs
from megatrain.plan.search.request import Request
from megatrain.train.caller import Caller
from megatrain.train.planning.asking import Asked, OwnMachine, ask
from megatrain.train.planning.gpus import of_ranks
from megatrain.train.records.metrics import format_count

MOST_RANKS = 1024
"""The largest number of GPUs of a table, where there is a network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The plan for a number of GPUs, each with the same tokens of a step."""

    gpus: int
    """The number of GPUs of each node."""
    nodes: int
    plan: Plan
    efficiency: float | None
    """The tokens per second of each GPU over those of the fewest GPUs that fit; None if it does not fit."""

    @property
    def num_ranks(self) -> int:
        """The number of GPUs in all."""
        return self.gpus * self.nodes


def sizes(spec: HardwareSpec) -> Iterator[tuple[int, int]]:
    """Yield the numbers of GPUs of a node and of nodes in powers of two; a full node comes before several."""
    gpus = 1
    while gpus < spec.num_gpus:
        yield gpus, 1
        gpus *= 2
    nodes = 1
    while nodes == 1 or (spec.network_bytes_per_s is not None and nodes * spec.num_gpus <= MOST_RANKS):
        yield spec.num_gpus, nodes
        nodes *= 2


def scale(
    request: Request, counts: Iterable[tuple[int, int]] | None = None, *, gathers: bool | None = None
) -> list[Row]:
    """Plan for more and more GPUs, each of which takes the micro-batches of the request.

    Args:
        request: The request for one GPU of the machine; its batch is that of each.
        counts: The numbers of GPUs of a node and of nodes; None takes those that `sizes` yields.
        gathers: Whether ranks gather weights, as in `of_ranks`.

    Raises:
        ConfigError: `of_ranks` raises it.
    """
    found: list[Row] = []
    least: float | None = None
    for gpus, nodes in sizes(request.spec) if counts is None else counts:
        count = gpus * nodes
        one = replace(request, spec=request.spec.with_ranks(gpus, nodes))
        whole = replace(one, batch=_times(request.batch, count))
        part = of_ranks(whole, count, nodes, gathers=gathers)
        plan = plan_with_open_runs(part) if request.batch.num_runs == 1 else make_plan(part)
        each = plan.tokens_per_s / count
        least = least or (each if plan.fits else None)
        efficiency = each / least if plan.fits and least else None
        found.append(Row(gpus=gpus, nodes=nodes, plan=plan, efficiency=efficiency))
    return found


def _times(batch: StepBatch, count: int) -> StepBatch:
    return replace(
        batch, num_micro_batches=count * batch.num_micro_batches, num_runs=max(batch.num_runs, count)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """The rows of a table, and the request that they answer."""

    asked: Asked
    spec: HardwareSpec
    rows: list[Row]

    @property
    def fits(self) -> bool:
        """Return whether any number of GPUs is enough."""
        return any(row.plan.fits for row in self.rows)


def plan_scale(
    raw: Mapping[str, Any], machine: HardwareSpec | OwnMachine, *, caller: Caller, **given: Any
) -> Scaling:
    """Plan a run on more and more GPUs of a machine, and on more and more such machines.

    Args:
        raw: The settings, as in `ask`; the batch is that of each GPU.
        machine: The machine with all of its GPUs.
        caller: The folders and the progress, as in `ask`.
        given: The other arguments of `ask`.
    """
    one = machine if isinstance(machine, OwnMachine) else machine.with_ranks(1)
    asked = ask(raw, one, caller=caller, **given)
    spec = asked.request.spec if isinstance(machine, OwnMachine) else machine
    caller.progress("planning for every number of GPUs")
    rows = scale(replace(asked.request, spec=spec), gathers=asked.config.parallel.gathers)
    return Scaling(asked=asked, spec=spec, rows=rows)


def scale_report(found: Scaling, *, as_json: bool = False) -> str:
    """Return the text that `megatrain plan --scale` prints."""
    if as_json:
        return json.dumps(scale_json(found))
    batch, anatomy, spec = found.asked.request.batch, found.asked.request.anatomy, found.spec
    shape = f"{batch.num_micro_batches} x {batch.micro_batch_size} x {batch.seq_len:,} = {batch.tokens:,}"
    lines = [
        f" model   {found.asked.model}: {format_count(anatomy.num_params)} parameters",
        f" step    {shape} tokens for each GPU",
        f" machine {spec.name}: {spec.num_gpus} x {spec.device}, {binary(spec.host_bytes)} of host memory",
        "",
        f"{'GPUs':>6}{'nodes':>7}{'tokens/s':>14}{'per GPU':>10}{'efficiency':>12}{'host / node':>14}  bound",
    ]
    for row in found.rows:
        plan, count = row.plan, row.num_ranks
        if row.efficiency is None:
            lines.append(f"{count:>6,}{row.nodes:>7,}  does not fit: {plan.problem}")
            continue
        each = plan.tokens_per_s / count
        lines.append(
            f"{count:>6,}{row.nodes:>7,}{plan.tokens_per_s:>14,.0f}{each:>10,.0f}{row.efficiency:>12.3f}"
            f"{binary(plan.tier_bytes('ram')):>14}  {plan.bound}"
        )
    return "\n".join(lines)


def scale_json(found: Scaling) -> dict[str, Any]:
    """Return the table as plain values."""
    request = found.asked.request
    return {
        "machine": found.spec.name,
        "model": found.asked.model,
        "num_params": request.anatomy.num_params,
        "tokens_per_gpu": request.batch.tokens,
        "peer_bytes_per_s": found.spec.peer_bytes_per_s,
        "network_bytes_per_s": found.spec.network_bytes_per_s,
        "rows": [_row_json(row) for row in found.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    plan = row.plan
    return {
        "num_gpus": row.num_ranks,
        "nodes": row.nodes,
        "fits": plan.fits,
        "problem": plan.problem or None,
        "tokens_per_step": plan.batch.step_tokens,
        "step_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "efficiency": row.efficiency,
        "bound": plan.bound,
        "bounds_s": dict(plan.bounds_s),
        "host_bytes_per_node": plan.tier_bytes("ram"),
        "bytes_per_step": dict(plan.bytes_per_step),
    }
