"""Two rounds whose gradients add up on the host, beside sums on the device: the engine on emulated lanes.

Every step is measured, Python and all, with real tensors; the lanes take as long as an H100 on PCIe 5 would,
slowed down alike. Every layer is recomputed and streams, gradients are clipped. For rounds of several sizes
the two sides take turns; a row says how far each is above its bound, below which no order of its work can be.
Prints a table, and a JSON object with everything last.

    python -m benchmarks.races.sums [--seconds 2] [--pairs 3] [--tokens 16384,8192] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.plan.emulated_runs import Case, Run, machine_of, spec_of
from benchmarks.races.engine import MACHINES, models, scale
from benchmarks.report import emit, hardware
from megatrain.config.choice import SUMS, Choice, StepBatch
from megatrain.plan.search.planner import plan_of

MACHINE, MODEL, LAYERS, ROUNDS = "h100-pcie5", "llama", 16, 2
TOKEN_SCALE = 256
"""A token of the small model stands for this many: what is really computed takes a part of the time."""
ALLOWED = 1.05
"""Times the bound: more is too slow for sums on the host, in rounds of as many tokens as are hidden there."""


def case_of(tokens: int) -> Case:
    """Return two rounds of one micro-batch each, of about so many tokens."""
    batch = StepBatch(micro_batch_size=1, seq_len=tokens // TOKEN_SCALE, num_micro_batches=ROUNDS)
    config = models()[MODEL]
    config.num_hidden_layers = LAYERS
    return Case(name=MODEL, config=config, batch=batch, precision="bf16")


def measure(tokens: int, *, seconds: float, pairs: int) -> dict[str, Any]:
    """Measure both sides in turn, in rounds of so many tokens and steps of about so many seconds."""
    case = case_of(tokens)
    machine = machine_of(scale(case, MACHINES[MACHINE], seconds, TOKEN_SCALE), device_bytes=None)
    request = case.request(spec_of(machine))
    base = Choice(num_slots=3, num_gradient_buffers=2).with_defaults(LAYERS)
    runs, plans = {}, {}
    samples: dict[str, list[float]] = {sums: [] for sums in SUMS}
    try:
        for sums in SUMS:
            choice = replace(base, sums=sums)
            plans[sums], runs[sums] = plan_of(request, choice), Run(case, machine, choice)
            for _ in range(2):
                runs[sums].step()
        for _ in range(pairs):
            for sums, run in runs.items():
                samples[sums].append(run.steady_s(2))
    finally:
        for run in runs.values():
            run.close()
    rows = {
        sums: {
            "planned_s": plan.step_s,
            "bound": plan.bound,
            "bound_s": max(plan.bounds_s.values()),
            "bounds_s": dict(plan.bounds_s),
            "step_s": statistics.median(samples[sums]),
            "samples_s": samples[sums],
            "over_bound": statistics.median(samples[sums]) / max(plan.bounds_s.values()),
        }
        for sums, plan in plans.items()
    }
    return {
        "tokens_per_round": tokens,
        "host_over_device_speed": rows["device"]["step_s"] / rows["host"]["step_s"],
        "is_within": rows["host"]["over_bound"] <= ALLOWED,
        **rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a step computes")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", default="16384,8192,4096", help="per round")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    results = []
    print("| tokens per round | sums | step s | bound s | over bound | planned s | bound |")
    print("|---|---|---|---|---|---|---|")
    for tokens in map(int, options.tokens.split(",")):
        results.append(measure(tokens, seconds=options.seconds, pairs=options.pairs))
        for sums in SUMS:
            row = results[-1][sums]
            print(
                f"| {tokens:,} | {sums} | {row['step_s']:.3f} | {row['bound_s']:.3f} "
                f"| {row['over_bound']:.3f} | {row['planned_s']:.3f} | {row['bound']} |",
                flush=True,
            )
    emit(
        {
            "benchmark": "host_sums",
            "machine": {MACHINE: MACHINES[MACHINE]},
            "rounds": ROUNDS,
            "hardware": hardware(),
            "results": results,
        },
        options.out,
    )


if __name__ == "__main__":
    main()
