"""Rows beyond the context of a trainer's model are refused; its positions are scaled where that is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.config.choice import Choice
from megatrain.errors import ConfigError
from megatrain.hf import MegatrainArguments, StreamingTrainer
from tests.families import MAX_POSITIONS, VOCAB_SIZE
from tests.hf.setups import arguments, assert_same_weights, logged, tiny

YARN = {"rope_type": "yarn", "factor": 4}


def rows(tokens: int, count: int = 4, padding: int = 0) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, VOCAB_SIZE, (count, tokens + padding), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, tokens:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return [
        {"input_ids": one, "labels": label, "attention_mask": seen}
        for one, label, seen in zip(ids, labels, mask, strict=True)
    ]


def trainer(directory: Path, model: Any, tokens: int, padding: int = 0, **settings: Any) -> StreamingTrainer:
    settings = {"choice": Choice(lockstep=2), "device": "checked", **settings}
    args = arguments(directory, gradient_accumulation_steps=2, max_steps=3, warmup_steps=0)
    return StreamingTrainer(
        model=model,
        args=args,
        train_dataset=rows(tokens, padding=padding),
        megatrain=MegatrainArguments(**settings),
    )


def test_a_row_of_a_batch_beyond_the_context_is_refused_by_its_own_tokens(tmp_path: Path) -> None:
    trainer(tmp_path, tiny(), MAX_POSITIONS, padding=16).train()  # padding is no position
    long = trainer(tmp_path, tiny(), MAX_POSITIONS + 1)
    with pytest.raises(
        ConfigError, match=r"a row of 65 tokens is beyond .* of 64 tokens; use 64 or less, or Mega.*2}"
    ):
        long.train()


def test_a_model_by_its_path_is_scaled_and_saved_so(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "model")
    ours = trainer(tmp_path, str(tmp_path / "model"), 100, rope_scaling=YARN, seq_len=100)
    ours.train()
    ours.save_model(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == 4 * MAX_POSITIONS
    by_hand = {name: config[name] for name in ("rope_parameters", "max_position_embeddings")}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **by_hand)
    again = trainer(tmp_path, model, 100, seq_len=100)  # with transformers' own scaling
    again.train()
    assert len(logged(again)) == 4
    assert logged(again) == logged(ours)
    assert_same_weights(dict(again.engine.named_masters()), dict(ours.engine.named_masters()))


def test_a_scaling_of_a_model_that_is_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model is made already; pass its path"):
        trainer(tmp_path, tiny(), 16, rope_scaling=YARN)
    with pytest.raises(ConfigError, match=r"factor is 0\.5; use 1 or more"):
        MegatrainArguments(rope_scaling={"rope_type": "yarn", "factor": 0.5})
    tiny().save_pretrained(tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"seq_len=257\) is beyond .* 256 tokens \(yarn, factor 4\); .*'factor': 5}\)"
    ):
        trainer(tmp_path, str(tmp_path / "model"), 16, rope_scaling=YARN, seq_len=257)
