"""What a model has no place for is exported as it was, whatever became of the files that it came from."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatrain
from megatrain.errors import ModelError
from megatrain.model.adapters.merge import write_model_of
from megatrain.train.resume.state import write_model
from tests.families import FAMILIES
from tests.model.resident import random_model
from tests.reference import attach_plainly, make_batches

OTHERS = {
    "mtp.layers.0.mlp.up_proj.weight": torch.randn(3, 5).bfloat16(),
    "mtp.scales": torch.rand(7).to(torch.float8_e4m3fn),
    "vision.counts": torch.arange(6, dtype=torch.int8),
}
CONSTANT = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
TOKENIZER: Any = SimpleNamespace(save_pretrained=lambda out: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    random_model(FAMILIES["llama"]()).save_pretrained(place)
    file = place / "model.safetensors"
    save_file({**load_file(file), **OTHERS, **CONSTANT}, file, {"format": "pt"})
    return place


def check(place: Path, trained: dict[str, torch.Tensor]) -> None:
    found = load_file(place / "model.safetensors")
    assert found.keys() == trained.keys() | OTHERS.keys()
    for key, value in {**trained, **OTHERS}.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key


def test_they_are_kept_over_checkpoints_that_go(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = source
    for number in range(3):
        model = megatrain.load(place)
        assert "3 tensors have no place in the model" in caplog.text
        assert "inv_freq" not in caplog.text
        shutil.rmtree(place)  # as retention removes what a run went on from
        engine = attach_plainly(model)
        optimizer = engine.adamw(lr=1e-2)
        engine.forward_backward(make_batches(1, seed=number))
        optimizer.step()
        place = tmp_path / f"step-{number}"
        write_model(engine, TOKENIZER, place)
        engine.sync()
        check(place, {name: parameter.detach() for name, parameter in model.named_parameters()})


def test_they_are_in_what_export_writes(source: Path, tmp_path: Path) -> None:
    write_model_of(source, tmp_path / "out", max_shard_bytes=5 * 2**30)
    found = load_file(source / "model.safetensors").items()
    check(tmp_path / "out", {key: value for key, value in found if key not in OTHERS | CONSTANT})


def test_one_of_a_type_that_cannot_be_written_is_refused(source: Path) -> None:
    file = source / "model.safetensors"
    save_file({**load_file(file), "odd": torch.ones(2, dtype=torch.complex64)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="odd has no place in the model, and is of dtype C64"):
        megatrain.load(source)
