"""One family from its files to its files: what holds of it, with the sentence of what does not."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import megatrain
from benchmarks.models.families import Family
from megatrain.errors import MegatrainError
from megatrain.hardware import load_machine
from megatrain.train.caller import Caller
from megatrain.train.commands.inspect_model import inspect_model
from megatrain.train.planning.plan_run import plan_run
from tests.stream.whole_model import (
    NO_PLACE,
    Directory,
    export_and_reopen,
    load_directory,
    train_beside,
    write_directory,
)

MACHINE = "rtx-4090"
STEPS = 3
BLOCK = 16
"""The side of a block of FP8 codes with one scale."""


@dataclass(slots=True)
class Verdict:
    """What was found of a family."""

    name: str
    model_type: str
    kind: str
    model_class: str = ""
    frozen: list[str] = field(default_factory=list)
    """Towers, which are frozen."""
    fixed: int = 0
    """Parameters that the class itself freezes."""
    num_quantised: int = 0
    """The weights of the tiny model that were read of FP8 codes."""
    failed: dict[str, str] = field(default_factory=dict)
    """What does not hold, by the name of the check."""

    def json(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return asdict(self)


CHECKS = ("load", "plan", "fp8", "steps", "export")
"""In this order; a check that fails ends the others of its family."""


def check(family: Family) -> Verdict:
    """Check a family, on a tiny model of its class."""
    found = Verdict(family.name, family.model_type, family.kind)
    with tempfile.TemporaryDirectory() as place:
        directory = write_directory(family.model_type, Path(place, "model"))
        found.model_class = type(directory.resident).__name__
        held: dict[str, Any] = {}
        for name in CHECKS:
            try:
                _CHECK[name](directory, found, held)
            except (MegatrainError, AssertionError) as error:
                found.failed[name] = str(error)
                break
    return found


def _load(directory: Directory, found: Verdict, held: dict[str, Any]) -> None:
    facts = inspect_model(str(directory.path))
    assert facts.untouched == (NO_PLACE,), facts.untouched
    found.frozen = sorted(name.rpartition(".")[-1] for name in facts.towers)
    found.fixed = sum(facts.fixed.values())
    held["model"] = load_directory(directory)


def _plan(directory: Directory, found: Verdict, held: dict[str, Any]) -> None:
    raw: dict[str, Any] = {
        "model": {"path": str(directory.path)},
        "data": {"seq_len": 64},
        "train": {"micro_batch_size": 1, "grad_accumulation": 2},
    }
    caller = Caller(counts=directory.path.with_name("counts"))
    file = directory.path / "config.json"
    planned = plan_run(raw, load_machine(MACHINE), source="check", hf_config=file, caller=caller)
    assert planned.plan.fits, planned.plan.problem


def _fp8(directory: Directory, found: Verdict, held: dict[str, Any]) -> None:
    """Read what two directories have, of which one has matrices as codes and scales, and hold them equal."""
    codes, values = (directory.path.with_name(name) for name in ("codes", "values"))
    coded, plain = quantised(load_file(directory.path / "model.safetensors"))
    for place, tensors, more in ((codes, coded, True), (values, plain, False)):
        place.mkdir()
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((directory.path / "config.json").read_text())
        if more:
            config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        (place / "config.json").write_text(json.dumps(config))
    found.num_quantised = len(coded) - len(plain)
    assert found.num_quantised
    models = [megatrain.load(place, precision="bf16") for place in (codes, values)]
    for (name, value), (_, expected) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(value, expected), name


def quantised(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Give projections codes of 8 bits with scales of blocks; return them, and in bf16 what they mean."""
    coded: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, value in tensors.items():
        coded[name] = plain[name] = value
        if name.endswith("_proj.weight") and value.ndim == 2:
            rows, columns = value.shape
            scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) / 16 + 0.01
            coded[name], coded[f"{name}_scale_inv"] = (16 * value).to(torch.float8_e4m3fn), scales
            wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
            plain[name] = (coded[name].float() * wide).bfloat16()
    return coded, plain


def _steps(directory: Directory, found: Verdict, held: dict[str, Any]) -> None:
    held["trained"] = train_beside(held["model"], directory.resident, steps=STEPS)


def _export(directory: Directory, found: Verdict, held: dict[str, Any]) -> None:
    engine, reference = held["trained"]
    export_and_reopen(engine, reference, directory, directory.path.with_name("out"))


_CHECK: dict[str, Callable[[Directory, Verdict, dict[str, Any]], None]] = {
    "load": _load,
    "plan": _plan,
    "fp8": _fp8,
    "steps": _steps,
    "export": _export,
}
