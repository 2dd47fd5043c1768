"""A link is throttled in the middle of a run: how soon is the run as fast as the best plan for the new speed?

On an emulated machine a run goes on for some steps as planned; then the links become slower by a factor.
The steps that follow are measured, and compared with runs that were planned for the new speed, or for the
old one, from the beginning.

    python -m benchmarks.plan.elasticity [--out FILE]
"""

from __future__ import annotations

import argparse
import logging
import statistics
from dataclasses import replace

from benchmarks.plan.emulated_runs import Case, Run, machine_of, spec_of, step_seconds
from benchmarks.races.engine import MACHINES, models, scale
from benchmarks.report import emit, hardware
from megatrain.config.choice import StepBatch
from megatrain.plan.search.planner import make_plan
from megatrain.train.planning.elastic import Elastic

SLOWER = 8.0
"""Of both links."""
BEFORE, AFTER = 5, 10
"""Steps before and after."""
SHARE = 0.5
"""The device's memory, of what it takes to keep everything there."""


def main() -> None:
    """Throttle a link on every machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.6, help="about how long a step takes")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    results = []
    for name, rates in MACHINES.items():
        batch = StepBatch(micro_batch_size=1, seq_len=64, num_micro_batches=4)
        case = Case(name="llama", config=models()["llama"], batch=batch)
        result = throttle(case, scale(case, rates, arguments.seconds))
        results.append({"machine": name, **result})
        print(
            f"{name:<14} best fixed plan for the new speed over the run's last steps: "
            f"{result['best_over_elastic']:.3f} (old plan: {result['best_over_old']:.3f}); "
            f"{result['changes']} changes, the last in step {result['changed_after']} after the change",
            flush=True,
        )
    emit({"benchmark": "elasticity", "hardware": hardware(), "results": results}, arguments.out)


def throttle(case: Case, rates: dict[str, float]) -> dict:
    """Run a case through the change."""
    machine = machine_of(rates, device_bytes=None)
    wide = make_plan(case.request(spec_of(machine)))
    limit = int(SHARE * wide.tier_bytes("device"))
    request = case.request(replace(spec_of(machine), device_bytes=limit))
    plan = make_plan(request)
    slow = {**rates, **{name: rates[name] / SLOWER for name in ("h2d_bytes_per_s", "d2h_bytes_per_s")}}
    slow_machine = machine_of(slow, device_bytes=None)
    best = make_plan(replace(request, spec=replace(spec_of(slow_machine), device_bytes=limit)))
    best_s = step_seconds(case, slow_machine, best.choice, num_steps=5)
    old_s = step_seconds(case, slow_machine, plan.choice, num_steps=5)
    run = Run(case, machine, plan.choice)
    elastic = Elastic(run.engine, request, plan)
    seconds, changed = [], []
    try:
        for number in range(BEFORE + AFTER + 4):
            if number == BEFORE:
                names = ("h2d_bytes_per_s", "d2h_bytes_per_s")
                run.engine.lanes.set_rates(**{name: slow[name] for name in names})  # type: ignore[attr-defined]
            seconds.append(run.step())
            if elastic.after_step(run.engine.last_step):
                changed.append(number - BEFORE + 1)
    finally:
        run.close()
    after = statistics.median(seconds[-4:])
    return {
        "best_s": best_s,
        "old_plan_s": old_s,
        "elastic_s": after,
        "best_over_elastic": best_s / after,
        "best_over_old": best_s / old_s,
        "changes": elastic.num_changes,
        "changed_after": max(changed, default=0),
        "steps_s": seconds,
    }


if __name__ == "__main__":
    main()
