"""What streaming costs in CPU time: a step of the engine over a resident one that keeps as much.

    python -m benchmarks.training.engine_over_resident [--activations recompute] [--layers 24]
        [--micro-batches 4] [--tokens 64] [--hidden 64] [--pairs 30] [--warm-up 3] [--profile] [--out FILE]

Both train the same small llama in fp32 on the CPU with one thread, from the same weights on the same batches:
the engine with all micro-batches in lockstep and every layer under one policy, the resident model with
torch's fused AdamW and its clipping, both eager. Under `recompute` the resident model has
`gradient_checkpointing_enable(use_reentrant=False)`, under `keep` it keeps what autograd saves. The layers
are so small that nearly all of a step is Python and dispatch: what a small batch on a fast device waits for.
Steps alternate, engine and resident, in one process. The time is that of all its threads, from one
`engine.sync()` to the next; the result is the median of the ratios within pairs.

Calls are counted by `sys.setprofile` in one step of each after the pairs: of functions in Python, and of
those in C that Python calls. `--profile` lists where they are made.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import megatrain
from benchmarks.report import emit, hardware, spread
from megatrain.config.choice import Choice, StepBatch

LR, BETAS, EPS, DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
Batch = dict[str, Tensor]


def main() -> None:
    """Measure both and compare them."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--activations", choices=["recompute", "keep"], default="recompute")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of a micro-batch, which is one row")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=30, help="of steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each that are not counted")
    parser.add_argument("--profile", action="store_true", help="list where calls are made")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sides = {
        "engine": Engine(make_model(arguments), arguments),
        "resident": Resident(make_model(arguments), recomputes=arguments.activations == "recompute"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.warm_up + arguments.pairs):
        batches = make_batches(arguments, seed=number)
        losses = {}
        for name, side in sides.items():
            start_s = time.process_time()
            losses[name] = side.step(batches)
            seconds[name].append(time.process_time() - start_s)
        check(losses["engine"], losses["resident"], is_first=number == 0)
    batches = make_batches(arguments, seed=-1)
    calls = {name: count_calls(side.step, batches) for name, side in sides.items()}
    timed = {name: values[arguments.warm_up :] for name, values in seconds.items()}
    ratios = [a / b for a, b in zip(timed["engine"], timed["resident"], strict=True)]
    visits = arguments.layers * arguments.micro_batches
    if arguments.profile:
        for line in table(calls, visits):
            print(line)
    in_python, all_calls = ({n: total(c, kinds) for n, c in calls.items()} for kinds in (["call"], None))
    emit(
        {
            "benchmark": "engine_over_resident",
            "cpu_time_ratio": spread(ratios),
            "python_calls_ratio": in_python["engine"] / in_python["resident"],
            "all_calls_ratio": all_calls["engine"] / all_calls["resident"],
            "engine_cpu_s": spread(timed["engine"]),
            "resident_cpu_s": spread(timed["resident"]),
            "excess_us_per_layer_and_micro_batch": 1e6
            * (statistics.median(timed["engine"]) - statistics.median(timed["resident"]))
            / visits,
            "python_calls_per_layer_and_micro_batch": {n: c / visits for n, c in in_python.items()},
            "all_calls_per_layer_and_micro_batch": {n: c / visits for n, c in all_calls.items()},
            "config": {key: value for key, value in vars(arguments).items() if key != "out"},
            "hardware": hardware(),
        },
        arguments.out,
    )


def make_model(arguments: argparse.Namespace) -> PreTrainedModel:
    """Make the model, always with the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=arguments.tokens,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def make_batches(arguments: argparse.Namespace, *, seed: int) -> list[Batch]:
    """Make the micro-batches of a step."""
    generator = torch.Generator().manual_seed(1000 + seed)
    shape = (arguments.micro_batches, 1, arguments.tokens)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 128, shape, generator=generator)]


class Engine:
    """The model under megatrain."""

    def __init__(self, model: PreTrainedModel, arguments: argparse.Namespace) -> None:
        """Attach it: two slots, every layer under the same policy, all micro-batches in lockstep."""
        number, layers = arguments.micro_batches, arguments.layers
        policies = (arguments.activations,) * layers
        choice = Choice(lockstep=number, activations=policies).with_defaults(num_layers=layers)
        batch = StepBatch(micro_batch_size=1, seq_len=arguments.tokens, num_micro_batches=number)
        self._engine = megatrain.attach(model, choice, batch=batch, compile="off")
        self._optimizer = self._engine.adamw(
            LR, betas=BETAS, eps=EPS, weight_decay=DECAY, max_grad_norm=MAX_NORM
        )

    def step(self, batches: list[Batch]) -> float:
        """Take a step to its end, and return its loss."""
        loss = self._engine.forward_backward(batches)
        self._optimizer.step()
        self._engine.sync()
        return float(loss)


class Resident:
    """The model as it is, in memory, under torch."""

    def __init__(self, model: PreTrainedModel, *, recomputes: bool) -> None:
        """Switch its own checkpointing on or not; make torch's AdamW with the groups of the engine."""
        if recomputes:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model = model
        decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        exempt = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": exempt, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def step(self, batches: list[Batch]) -> float:
        """Take a step, and return its loss."""
        total = sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)
        loss = torch.zeros(())
        for batch in batches:
            part = self._model(**batch, num_items_in_batch=total).loss
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)


def check(engine: float, resident: float, *, is_first: bool) -> None:
    """End if the two do not train alike: the first loss is equal, later ones up to the norms' rounding."""
    if engine != resident if is_first else abs(engine - resident) > 1e-4 * resident:
        sys.exit(f"the losses differ: {engine!r} and {resident!r}")


Calls = collections.Counter[tuple[str, str]]
"""By kind, `call` in Python or `c_call` in C, and name."""


def count_calls(step: Callable[[list[Batch]], float], batches: list[Batch]) -> Calls:
    """Count the calls of a step, all of which this thread makes."""
    calls: Calls = collections.Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            place = "/".join(code.co_filename.rsplit("/", 3)[1:])
            calls[event, f"{place}:{code.co_firstlineno} {code.co_qualname}"] += 1
        elif event == "c_call":
            calls[event, getattr(argument, "__qualname__", repr(argument))] += 1

    sys.setprofile(note)
    try:
        step(batches)
    finally:
        sys.setprofile(None)
    return calls


def total(calls: Calls, kinds: Iterable[str] | None) -> int:
    """Add calls up; None: of both kinds."""
    return sum(count for (kind, _), count in calls.items() if kinds is None or kind in kinds)


def table(calls: dict[str, Calls], visits: int) -> list[str]:
    """List what either side calls most, per layer and micro-batch, where they differ."""
    engine, resident = calls["engine"], calls["resident"]
    names = sorted(engine.keys() | resident.keys(), key=lambda name: engine[name] - resident[name])
    lines = [f"{'engine':>8} {'resident':>8}  calls per layer and micro-batch"]
    for kind, what in reversed(names):
        first, second = engine[kind, what] / visits, resident[kind, what] / visits
        if abs(first - second) >= 0.05:
            lines.append(f"{first:8.2f} {second:8.2f}  {'C ' if kind == 'c_call' else ''}{what}")
    return lines


if __name__ == "__main__":
    main()
