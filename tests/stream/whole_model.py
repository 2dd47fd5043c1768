"""A model from its files to its files: loaded, planned, trained beside a resident twin, exported, reopened.

The resident side is transformers and torch alone: the class that was saved, of which nothing is frozen but
what the class itself freezes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import megatrain
from megatrain.model.weights.export import export_weights
from megatrain.model.weights.untouched import UNTOUCHED
from megatrain.stream.engine import Engine
from tests.kinds import tiny_model
from tests.model.weights.test_export import tensors_of
from tests.reference import Batch, Resident, assert_same_bits, attach_plainly, make_batches
from tests.stream.runs import HYPER, assert_same_masters, assert_same_round

NO_PLACE = "next_token_layers.0.weight"
"""A tensor that no model has a place for, as checkpoints have of layers that predict further tokens."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A model directory, and the resident model that was saved there."""

    path: Path
    resident: PreTrainedModel
    tensors: dict[str, Tensor]


def write_directory(name: str, place: Path) -> Directory:
    """Save a tiny model of a type, with a tensor beside it that it has no place for."""
    model = tiny_model(name)
    model.save_pretrained(place)
    file = place / "model.safetensors"
    save_file({**load_file(file), NO_PLACE: torch.arange(6.0)}, file, metadata={"format": "pt"})
    frozen = {each for each, parameter in model.named_parameters() if not parameter.requires_grad}
    resident = type(model).from_pretrained(place, dtype=torch.float32)
    for each, parameter in resident.named_parameters():
        parameter.requires_grad_(each not in frozen)
    return Directory(place, resident.train(), tensors_of(place))


def load_directory(directory: Directory) -> PreTrainedModel:
    """Load it as a run does, in training mode."""
    return megatrain.load(directory.path).train()


def text(number: int, step: int) -> list[Batch]:
    """Make micro-batches of tokens that stand for no image."""
    return [
        {name: value % 100 + 5 for name, value in batch.items()} for batch in make_batches(number, seed=step)
    ]


def counts_tokens(resident: PreTrainedModel) -> bool:
    """Whether a class takes the number of tokens that its loss is divided by; older ones take none."""
    (batch,) = text(1, 0)
    with torch.no_grad():
        plain = resident(**batch).loss
        try:
            halved = resident(**batch, num_items_in_batch=torch.tensor(60)).loss
        except TypeError:
            return False
    return bool(torch.allclose(plain, 2 * halved, rtol=1e-3))


def train_beside(
    model: PreTrainedModel, resident: PreTrainedModel, *, steps: int = 3, **settings: Any
) -> tuple[Engine, Resident]:
    """Train both, and hold every loss, gradient and weight of theirs against each other, bit for bit.

    `settings` are those of `attach_plainly`.
    """
    number = settings.setdefault("num_micro_batches", 2 if counts_tokens(resident) else 1)
    reference = Resident(resident, **HYPER)
    engine = attach_plainly(model, **{"num_slots": 2, "activations": "recompute", **settings})
    optimizer = engine.adamw(**HYPER, max_grad_norm=None)
    for step in range(steps):
        assert_same_round(engine, reference, text(number, step))
        reference.step(optimizer.step().grad_norm, None)
    assert_same_masters(engine, reference)
    return engine, reference


def export_and_reopen(engine: Engine, reference: Resident, directory: Directory, out: Path) -> None:
    """Export, and hold every tensor against the resident's: in the file, and in the class that opens it."""
    model, masters = engine.model, dict(engine.named_masters())
    groups = [[entry.name for entry in layout.entries] for layout in engine.host.layouts]
    export_weights(model, out, groups=groups, read=masters.__getitem__, untouched=model.__dict__[UNTOUCHED])
    written = tensors_of(out)
    assert written.keys() == directory.tensors.keys()
    assert_same_bits(written[NO_PLACE], directory.tensors[NO_PLACE], NO_PLACE)
    again = type(directory.resident).from_pretrained(out, dtype=torch.float32)
    expected = dict(reference.model.named_parameters())
    for name, parameter in again.named_parameters():
        assert_same_bits(parameter.detach(), expected[name].detach(), f"{name}, reopened")
