"""Compressed moments, plan against fact: how much longer or shorter a step with bf16 or int8 moments is.

    python -m benchmarks.plan.compressed_moments [--pairs N] [--out FILE]

Three engines train one small model on this CPU, whose step is mostly AdamW: with moments in fp32, in bf16 and
in int8. In each pair the machine's rates are measured as `megatrain doctor --bench` measures them, then the
engines take steps in turn. A plan is right as far as its ratio to fp32 is the measured one, and as far as its
seconds are those of the step. Medians over the pairs count; the machine's speed changes by the minute.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.plan.against_fact import this_cpu
from benchmarks.plan.emulated_runs import Case, Run
from benchmarks.report import emit, hardware, spread
from megatrain.config.choice import Choice, StepBatch
from megatrain.doctor.bench import QUICK, run_bench
from megatrain.doctor.machine_spec import machine_of
from megatrain.plan.search.planner import plan_of

STATES = ("fp32", "bf16", "int8")
LAYERS, STEPS = 6, 5
CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=512,
    max_position_embeddings=64,
)
BATCH = StepBatch(micro_batch_size=1, seq_len=8, num_micro_batches=1)


def case_of(state: str) -> Case:
    """Return the run with moments in a format."""
    return Case(name=state, config=CONFIG, batch=BATCH, state=state)


def main() -> None:
    """Measure, print a table, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    choice = Choice(num_slots=1, activations=("keep",) * LAYERS, updates="serial").with_defaults(LAYERS)
    cases = {state: case_of(state) for state in STATES}
    runs = {state: Run(case, None, choice) for state, case in cases.items()}
    for run in runs.values():
        run.step()
    planned: dict[str, list[float]] = {state: [] for state in STATES}
    taken: dict[str, list[float]] = {state: [] for state in STATES}
    for _ in range(arguments.pairs):
        bench = run_bench(torch.device("cpu"), None, replace(QUICK, seconds=0.2, compresses=True))
        spec = this_cpu(cases["fp32"], machine_of(bench, None))
        seconds: dict[str, list[float]] = {state: [] for state in STATES}
        for _ in range(STEPS):
            for state, run in runs.items():
                seconds[state].append(run.step())
        for state in STATES:
            planned[state].append(plan_of(cases[state].request(spec), choice).step_s)
            taken[state].append(statistics.median(seconds[state]))
    result: dict[str, Any] = {"benchmark": "compressed_moments", "hardware": hardware(), "states": {}}
    print("moments  step / fp32's: planned  measured  difference   seconds: planned / measured - 1")
    for state in STATES:
        ratios = [mine / base for mine, base in zip(planned[state], planned["fp32"], strict=True)]
        facts = [mine / base for mine, base in zip(taken[state], taken["fp32"], strict=True)]
        differences = [ratio / fact - 1 for ratio, fact in zip(ratios, facts, strict=True)]
        errors = [plan / fact - 1 for plan, fact in zip(planned[state], taken[state], strict=True)]
        result["states"][state] = {
            "planned_ratio": spread(ratios),
            "measured_ratio": spread(facts),
            "ratio_error": spread(differences),
            "seconds_error": spread(errors),
        }
        print(
            f"{state:7}  {statistics.median(ratios):22.2f}  {statistics.median(facts):8.2f}  "
            f"{statistics.median(differences):+10.1%}   {statistics.median(errors):+.1%}"
        )
    emit(result, arguments.out)


if __name__ == "__main__":
    main()
