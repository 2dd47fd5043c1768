"""The proof of a machine: results that must be equal, and a streamed step beside its plan, in one file.

Cells train a tiny model on the device in ways that change where numbers live, and must change none of them:
the first step's loss and gradients are those of the resident Hugging Face model, and all cells of a precision
end with the same weights. Then a model of some layers streams with nothing resident, and what its step took
is held against the plan for the rates that were just measured.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatrain.config.choice import Choice, StepBatch
from megatrain.doctor.checks import Check, failed, passed, warning
from megatrain.errors import MegatrainError
from megatrain.hardware.memory import GIB, host_memory
from megatrain.hardware.spec import HardwareSpec
from megatrain.stream.attach.attach import attach
from megatrain.stream.attach.load import load
from megatrain.stream.forward.attention import chosen_kernels

CELLS: Mapping[str, Mapping[str, Any]] = {
    "fp32, layers run again": {"precision": "fp32", "activations": "recompute"},
    "fp32, activations on the host": {"precision": "fp32", "activations": "offload", "boundaries": "host"},
    "fp32, kept": {"precision": "fp32", "activations": "keep"},
    "bf16, layers run again": {"precision": "bf16", "activations": "recompute"},
    "bf16, one slot": {"precision": "bf16", "activations": "recompute", "num_slots": 1},
    "bf16, half resident": {"precision": "bf16", "activations": "keep", "resident_layers": 2},
}
"""The settings of each cell."""

_LAYERS, _VOCABULARY, _TOKENS = 4, 256, 32
_STEPS = 2
_OFF = 0.3
"""Part of a planned step by which a measured one may differ before that is a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The model whose step is timed, and its batch."""

    hidden_size: int
    num_layers: int = 4
    vocab_size: int = 32_000
    rows: int = 8
    row_tokens: int = 1024
    num_steps: int = 5


TINY = Shape(hidden_size=128, vocab_size=512, rows=2, row_tokens=64)
_OF_CPU = Shape(hidden_size=256, vocab_size=2048, rows=2, row_tokens=256)
_LARGE, _MIDDLE = Shape(hidden_size=4096), Shape(hidden_size=2048)
_LARGE_HOST_BYTES = 40 * GIB
"""Free host memory from which the large shape is taken, whose state takes less than half of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The findings of a proof; they name no user, host or path."""

    checks: tuple[Check, ...]
    cells: Mapping[str, Mapping[str, str]]
    """By cell, the digests of its first loss, its gradients and its weights."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """The streamed step: its seconds, those of the plan and of its bounds, and its timeline."""

    def json(self) -> dict[str, Any]:
        """Return everything, for a program or a bug report."""
        return {"cells": {name: dict(found) for name, found in self.cells.items()}, "step": dict(self.step)}


def prove(
    device: torch.device,
    machine: HardwareSpec,
    *,
    shape: Shape | None = None,
    progress: Callable[[str], object] = lambda doing: None,
) -> Proof:
    """Train on this machine, and hold what comes out against what must.

    Args:
        device: The device on which blocks run.
        machine: The machine with the rates that were measured just now.
        shape: The model whose step is timed; None: one that suits the device and the memory.
        progress: A function that is told what takes time, before it begins.
    """
    cells: dict[str, dict[str, str]] = {}
    problems: dict[str, str] = {}
    expected: dict[str, dict[str, str]] = {}
    for name, settings in CELLS.items():
        progress(f"training a tiny model: {name}")
        precision = settings["precision"]
        try:
            if precision not in expected:
                expected[precision] = _resident(device, precision)
            cells[name] = _streamed(device, settings)
        except (MegatrainError, RuntimeError) as error:  # a driver may refuse anything
            problems[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    problems |= dict(_wrong(cells, expected))
    checks = [_judged(problems)]
    step: dict[str, Any] = {}
    progress("training a streamed model")
    try:
        step = _timed_step(device, machine, shape or _fitting(device))
        checks.append(_beside_plan(step))
    except (MegatrainError, RuntimeError) as error:
        text = f"it ended with {type(error).__name__}: {str(error).splitlines()[0]}"
        checks.append(failed("streamed step", text, "send this file with a bug report"))
    return Proof(checks=tuple(checks), cells=cells, step=step)


# -- cells that must be equal ------------------------------------------------------------------------------


def _model(precision: str) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_TOKENS,
    )
    return load(config=config, seed=0, precision=precision).train()


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(_VOCABULARY, (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def _resident(device: torch.device, precision: str) -> dict[str, str]:
    """Return the digests of the first loss and gradients of the plain model on the device."""
    from transformers import AutoModelForCausalLM

    source = _model(precision)
    model = AutoModelForCausalLM.from_config(source.config, dtype=next(source.parameters()).dtype)
    model.load_state_dict(source.state_dict())
    model = model.train().to(device)
    batch = {name: value.to(device) for name, value in _batch().items()}
    count = torch.tensor(batch["labels"][:, 1:].numel(), device=device)
    with chosen_kernels(model, device, repeats=True):
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": _digest({"": loss.detach()}), "gradients": _digest(gradients)}


def _streamed(device: torch.device, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of a cell: of its first loss and gradients, and of its weights at the end."""
    model, fields = _model(settings["precision"]), dict(settings)
    choice = Choice(**{name: value for name, value in fields.items() if name != "precision"})
    engine = attach(
        model,
        choice.with_defaults(_LAYERS),
        device=str(device),
        precision=fields["precision"],
        compile="off",
        deterministic=True,
    )
    try:
        optimizer = engine.adamw(lr=1e-3)
        found: dict[str, str] = {}
        for step in range(_STEPS):
            loss = engine.forward_backward([_batch()])
            if step == 0:
                found["loss"] = _digest({"": loss})
                found["gradients"] = _digest(dict(engine.named_gradients()))
            optimizer.step()
        found["weights"] = _digest(dict(engine.named_masters()))
        return found
    finally:
        engine.detach()
        engine.lanes.close()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of values as fp32, in which every bf16 number is itself."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _wrong(
    cells: Mapping[str, Mapping[str, str]], expected: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the cells that differ from the resident model, or from the first cell of their precision."""
    ends: dict[str, str] = {}
    for name, found in cells.items():
        precision = CELLS[name]["precision"]
        end = ends.setdefault(precision, found["weights"])
        wrong = [what for what, digest in expected[precision].items() if found[what] != digest]
        if wrong:
            yield name, f"its {' and '.join(wrong)} are not those of the resident model"
        elif found["weights"] != end:
            yield name, "its weights are not those of the same training in another way"


def _judged(problems: Mapping[str, str]) -> Check:
    name = "same results"
    if not problems:
        text = (
            f"{len(CELLS)} ways to train give the resident model's loss and gradients, and the same weights"
        )
        return passed(name, text)
    text = "; ".join(f"{cell}: {problem}" for cell, problem in problems.items())
    return failed(name, text, "do not train here; send the proof with a bug report")


# -- a step beside its plan --------------------------------------------------------------------------------


def _fitting(device: torch.device) -> Shape:
    if device.type == "cpu":
        return _OF_CPU
    return _LARGE if host_memory().available_bytes >= _LARGE_HOST_BYTES else _MIDDLE


def _timed_step(device: torch.device, machine: HardwareSpec, shape: Shape) -> dict[str, Any]:
    """Train with nothing resident, and return what a step took, what was planned, and one step's timeline."""
    from transformers import LlamaConfig

    from megatrain.model.profile.count import count_anatomy
    from megatrain.plan.search.planner import plan_of
    from megatrain.plan.search.request import Request

    heads = max(2, shape.hidden_size // 128)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.hidden_size * 7 // 2,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=shape.row_tokens,
    )
    batch = StepBatch(micro_batch_size=shape.rows, seq_len=shape.row_tokens, num_micro_batches=1)
    choice = Choice(activations=("recompute",) * shape.num_layers).with_defaults(shape.num_layers)
    model = load(config=config, seed=0, precision="bf16").train()
    engine = attach(model, choice, device=str(device), precision="bf16", batch=batch, compile="off")
    ids = torch.randint(shape.vocab_size, (shape.rows, shape.row_tokens))
    spans: list[Any] = []
    try:
        optimizer = engine.adamw(lr=1e-5)
        seconds = []
        for number in range(shape.num_steps + 1):
            if number == shape.num_steps:
                engine.meter.take()
                engine.meter.on_record = lambda record: spans.extend(record.spans)
            began_s = time.perf_counter()
            engine.forward_backward([{"input_ids": ids, "labels": ids}])
            optimizer.step()
            engine.sync()
            seconds.append(time.perf_counter() - began_s)
        engine.meter.take()
        engine.meter.on_record = None
    finally:
        engine.detach()
        engine.lanes.close()
        del engine, model
        gc.collect()
    anatomy = count_anatomy(config, micro_batch_size=shape.rows, seq_len=shape.row_tokens, precision="bf16")
    plan = plan_of(Request(spec=machine, anatomy=anatomy, batch=batch), choice)
    first_s = min((span.start_s for span in spans), default=0.0)
    return {
        "shape": asdict(shape),
        "step_s": statistics.median(seconds[1 : shape.num_steps]),
        "steps_s": seconds,
        "planned_s": plan.step_s,
        "bound": plan.bound,
        "bounds_s": dict(plan.bounds_s),
        "timeline": [
            [span.lane.value, span.label, round(span.start_s - first_s, 6), round(span.end_s - first_s, 6)]
            for span in sorted(spans, key=lambda span: span.start_s)
        ],
    }


def _beside_plan(step: Mapping[str, Any]) -> Check:
    took_s, planned_s = step["step_s"], step["planned_s"]
    text = (
        f"{took_s:.3g} s, where the plan says {planned_s:.3g} s and its bound, {step['bound']}, is "
        f"{step['bounds_s'][step['bound']]:.3g} s"
    )
    if took_s > (1 + _OFF) * planned_s:
        return warning(
            "streamed step",
            text,
            "stop what else runs on this machine, and prove it again; then send the proof with a bug report",
        )
    return passed("streamed step", text)
