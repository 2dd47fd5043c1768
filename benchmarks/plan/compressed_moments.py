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
import time
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig

import megatrain
from benchmarks.report import emit, hardware, spread
from megatrain.config.choice import Choice, StepBatch
from megatrain.doctor.bench import QUICK, run_bench
from megatrain.doctor.machine_spec import machine_of
from megatrain.hardware import HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.model.profile.timing import time_layers
from megatrain.plan.cost.measured import Measured
from megatrain.plan.cost.rates import Rates
from megatrain.plan.search.planner import plan_of
from megatrain.plan.search.request import Request

STATES = ("fp32", "bf16", "int8")
LAYERS, SEQ_LEN, PRECISION, STEPS = 6, 8, "fp32", 5
CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=512,
    max_position_embeddings=64,
)
BATCH = StepBatch(micro_batch_size=1, seq_len=SEQ_LEN, num_micro_batches=1)


class Run:
    """An engine with its optimizer, whose steps are timed."""

    def __init__(self, state: str, choice: Choice) -> None:
        """Attach to a random model of its own."""
        model = megatrain.load(config=CONFIG, seed=0, precision=PRECISION)
        self._engine = megatrain.attach(
            model.train(), choice, precision=PRECISION, batch=BATCH, optimizer_state=state, compile="off"
        )
        self._optimizer = self._engine.adamw(lr=1e-4)
        ids = torch.arange(SEQ_LEN)[None]
        self._batches = [{"input_ids": ids, "labels": ids}]

    def step_s(self) -> float:
        """Take a step, updates included."""
        began_s = time.perf_counter()
        self._engine.forward_backward(self._batches)
        self._optimizer.step()
        self._engine.sync()
        return time.perf_counter() - began_s


def this_cpu(anatomy: Anatomy) -> HardwareSpec:
    """Return this computer at the rates of this moment."""
    bench = run_bench(
        torch.device("cpu"), None, replace(QUICK, seconds=0.2, overhead_layers=4, compresses=True)
    )
    timed = time_layers(CONFIG, micro_batch_size=1, seq_len=SEQ_LEN, precision=PRECISION)
    spec = machine_of(bench, None)
    return Measured.of_layers(Rates(spec, PRECISION), anatomy, timed).applied(spec)


def main() -> None:
    """Measure, print a table, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    anatomy = count_anatomy(
        CONFIG, micro_batch_size=1, seq_len=SEQ_LEN, precision=PRECISION, device_type="cpu"
    )
    choice = Choice(num_slots=1, activations=("keep",) * LAYERS, updates="serial").with_defaults(LAYERS)
    runs = {state: Run(state, choice) for state in STATES}
    for run in runs.values():
        run.step_s()
    planned: dict[str, list[float]] = {state: [] for state in STATES}
    taken: dict[str, list[float]] = {state: [] for state in STATES}
    for _ in range(arguments.pairs):
        spec = this_cpu(anatomy)
        seconds: dict[str, list[float]] = {state: [] for state in STATES}
        for _ in range(STEPS):
            for state, run in runs.items():
                seconds[state].append(run.step_s())
        for state in STATES:
            request = Request(spec=spec, anatomy=anatomy, batch=BATCH, state=state)
            planned[state].append(plan_of(request, choice).step_s)
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
