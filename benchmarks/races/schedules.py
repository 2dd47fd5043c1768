"""Rivals' schedules beside ours, on the planner's timetable: arithmetic, nothing is measured.

    python -m benchmarks.races.schedules [--machine h100] [--model Llama-3.1-8B] [--out FILE]

Every side does its best: the same tokens per step, in as many micro-batches as suit it (1 to 64), with the
policies that it has, in the same device memory; ours is what `megatrain plan` chooses, clipped, with fp32
masters. The rates are those of the machine file, and contention for links and host memory counts for all.

- MegaTrain: three forwards and a backward, weights come up three times, everything else after the backward
  and in turn (32 bytes of host memory per parameter). It has no switch for its policy.
- ZeRO-3 with offload: activation checkpoints or none, weights come up twice, AdamW after the backward and in
  turn (42 bytes per parameter).
- `kernels: same` gives all of them the fused kernels that our layers compile to, so that schedules alone
  differ; `own` gives each what it runs: MegaTrain's layers are not compiled.

`over compute` is the step over its own forward and backward with nothing run again: what schedule, policy and
optimizer cost together. Where it is close to 1 for a rival too, no schedule can win much: that is so from
some hundred thousand tokens per step on. What is left there is memory: bytes of host memory per parameter are
printed beside.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.published.rows import Row, anatomy_of, choice_of, step_of
from benchmarks.report import emit, hardware
from megatrain.config.choice import Choice
from megatrain.hardware import HardwareSpec, load_machine
from megatrain.plan.cost.rates import Kernels
from megatrain.plan.cost.step_time import Step
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request, overflow

SEQ_LEN = 1024
TOKENS = (8_192, 16_384, 32_768, 65_536, 131_072, 524_288)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SAME = Kernels(fuses_layers=True)
"""What our layers compile to; head and loss are not compiled."""

RIVALS = {"MegaTrain": (None,), "ZeRO-3 offload": (None, 0.0)}
"""By system, the policies that it has: as it is, or with nothing run again."""

HOST_BYTES = {"ours": 14, "MegaTrain": 14, "ZeRO-3 offload": 18}
"""Per parameter: ours while gradients wait for the norm in host memory; ZeRO-3's model needs 18, and 23 were
measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The best that a side can do."""

    side: str
    kernels: str
    tokens: int
    num_micro_batches: int
    step_s: float
    tokens_per_s: float
    over_compute: float
    bound: str
    choice: str


def rows_of(system: str, machine: str, model: str, tokens: int) -> Iterator[Row]:
    """Yield what a system can do with so many tokens per step."""
    for count in MICRO_BATCHES:
        rows = tokens // SEQ_LEN // count
        for recomputed in RIVALS[system] if rows else ():
            yield Row(
                system=system,
                machine=machine,
                model=model,
                seq_len=SEQ_LEN,
                micro_batch_size=rows,
                num_micro_batches=count,
                lockstep=1,
                tokens_per_s=0.0,
                recomputed=recomputed,
            )


def request_of(row: Row, spec: HardwareSpec) -> Request:
    """Return what a plan for a row's model and batch is asked for."""
    return Request(spec=spec, anatomy=anatomy_of(row), batch=row.batch, compiles=True)


def rival(system: str, machine: str, model: str, tokens: int, kernels: str) -> Entry | None:
    """Return the best that a rival can do; None: nothing fits."""
    spec, best = load_machine(machine), None
    for row in rows_of(system, machine, model, tokens):
        request, choice = request_of(row, spec), choice_of(row)
        if "device" in overflow(request, choice):
            continue
        used = SAME if kernels == "same" else replace(SAME, fuses_layers=system != "MegaTrain")
        step = step_of(row, spec, used)
        if best is None or step.step_s < best[1].step_s:
            best = row, step
    return None if best is None else entry(system, kernels, best[0], best[1])


def ours(machine: str, model: str, tokens: int) -> Entry | None:
    """Return the best plan."""
    spec, best = replace(load_machine(machine), drives=None), None
    for row in rows_of("MegaTrain", machine, model, tokens):
        request = request_of(row, spec)
        plan = make_plan(request)
        if plan.fits and (best is None or plan.step_s < best[1].step_s):
            best = row, Step(request.rates, request.anatomy, plan.choice, row.batch)
    return None if best is None else entry("ours", "same", best[0], best[1])


def entry(side: str, kernels: str, row: Row, step: Step) -> Entry:
    """Describe a step."""
    kept = Choice(activations=("keep",) * len(step.anatomy.layers)).with_defaults(len(step.anatomy.layers))
    compute_s = Step(step.rates, step.anatomy, kept, step.batch, clips=step.clips).compute_s
    return Entry(
        side=side,
        kernels=kernels,
        tokens=row.tokens,
        num_micro_batches=row.num_micro_batches,
        step_s=step.step_s,
        tokens_per_s=row.tokens / step.step_s,
        over_compute=step.step_s / compute_s,
        bound=max(step.bounds_s, key=lambda name: step.bounds_s[name]),
        choice=described(step.choice),
    )


def described(choice: Choice) -> str:
    """Name what of a choice differs between sides."""
    policies = [policy.name for policy in choice.policies]
    kinds = ", ".join(f"{policies.count(policy)} {policy}" for policy in dict.fromkeys(policies))
    return f"{kinds}; {choice.lockstep} in lockstep, {choice.resident_layers} resident, {choice.updates}"


def race(machine: str, model: str) -> Iterator[Entry]:
    """Yield every side's best, ours first."""
    for tokens in TOKENS:
        first = ours(machine, model, tokens)
        if first is not None:
            yield first
        for system in RIVALS:
            for kernels in ("same", "own") if system == "MegaTrain" else ("same",):
                found = rival(system, machine, model, tokens, kernels)
                if found is not None:
                    yield found


def table(found: Sequence[Entry]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    heads = "tokens per step", "side", "kernels", "micro-batches", "tokens/s", "ours is faster by"
    yield f"| {' | '.join(heads)} | over compute | |"
    yield "|---|---|---|---|---|---|---|---|"
    speeds = {one.tokens: one.tokens_per_s for one in found if one.side == "ours"}
    for one in found:
        ratio = "" if one.side == "ours" else f"{speeds[one.tokens] / one.tokens_per_s:.2f}"
        yield (
            f"| {one.tokens:,} | {one.side} | {one.kernels} | {one.num_micro_batches} "
            f"| {one.tokens_per_s:,.0f} | {ratio} | {one.over_compute:.2f} | {one.choice} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--out", help="file to save the JSON line to")
    options = parser.parse_args(arguments)
    found = list(race(options.machine, options.model))
    print("\n".join(table(found)))
    print(f"host memory, bytes per parameter: {', '.join(f'{k} {v}' for k, v in HOST_BYTES.items())}")
    emit(
        {
            "benchmark": "schedules",
            "what": "arithmetic: the planner's timetable, nothing measured",
            "machine": options.machine,
            "model": options.model,
            "rows": [asdict(one) for one in found],
            "hardware": hardware(),
        },
        options.out,
    )


if __name__ == "__main__":
    main()
