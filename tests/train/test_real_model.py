"""A small real pretrained model on real text, streamed and resident: the same loss at every step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, get_scheduler

from megatrain.config import build_config
from megatrain.model.weights.skeleton import read_config
from megatrain.train.loop import train
from megatrain.train.outputs.sample import sample
from megatrain.train.run_data import make_loader, read_data
from tests.reference import Resident

SHARED = Path(__file__).parents[3] / "shared/data"


@pytest.mark.parity
@pytest.mark.parametrize(("steps", "share"), [(50, 0.9), pytest.param(200, 0.6, marks=pytest.mark.parity)])
def test_finetuned_story_model_equals_resident(tmp_path: Path, steps: int, share: float) -> None:
    """And the loss falls to this share of the first one."""
    model_path, text = SHARED / "stories260K/hf", SHARED / "text/tinyshakespeare.txt"
    if not model_path.is_dir() or not text.is_file():
        pytest.skip("needs stories260K and tinyshakespeare in shared/data next to the repository")
    config = build_config(
        {
            "model": {"path": str(model_path)},
            "data": {"path": str(text), "seq_len": 64},
            "train": {"steps": steps, "micro_batch_size": 2, "grad_accumulation": 2, "device": "cpu"},
            "optim": {"lr": 1e-3, "warmup_steps": 20, "weight_decay": 0.1},
            "checkpoint": {"every": None},
            "log": {"progress": "none"},
            "out": str(tmp_path / "run"),
        }
    )
    train(config)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]

    reference = Resident(
        AutoModelForCausalLM.from_pretrained(model_path).train(),
        lr=config.optim.lr,
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
    )
    schedule = get_scheduler("cosine", reference.optimizer, num_warmup_steps=20, num_training_steps=steps)
    loader = make_loader(read_data(config, read_config(model_path)), config)
    for row, batches in zip(rows, loader, strict=False):
        loss = float(reference.forward_backward(batches))
        assert row["loss"] == loss, row["step"]
        assert row["grad_norm"] == pytest.approx(reference.norm(), rel=1e-6)
        reference.step(row["grad_norm"], config.optim.max_grad_norm)
        schedule.step()
    assert len(rows) == steps
    assert rows[-1]["loss"] < share * rows[0]["loss"]

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter.detach(), reference.parameters[name].detach()), name
    assert len(sample(str(tmp_path / "run"), "ROMEO:", max_new_tokens=20)) > len("ROMEO:")
