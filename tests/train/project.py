"""A small model directory and corpus for tests of whole runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import LlamaConfig, MixtralConfig

from megatrain.config import Config, build_config
from megatrain.config.choice import AUTO
from megatrain.config.decided import smallest_micro_batches, with_rows, with_step
from megatrain.train import loop

WORDS = ("one", "small", "step", "for", "a", "block", "giant", "leap", "through", "the", "slots", "again")


def write_corpus(file: Path, num_words: int = 6000) -> Path:
    """Write words in a fixed random order, 20 to a line."""
    chance = random.Random(0)
    lines = [" ".join(chance.choice(WORDS) for _ in range(20)) for _ in range(num_words // 20)]
    file.write_text("\n".join(lines) + "\n")
    return file


def write_model_config(directory: Path, **changes: Any) -> Path:
    """Write the config.json of a tiny Llama."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    LlamaConfig(**{**settings, **changes}).save_pretrained(directory)
    return directory


def write_model_with_experts(directory: Path) -> Path:
    """Write the config.json of a tiny Mixtral: two layers of four experts, two for each token."""
    MixtralConfig(
        architectures=["MixtralForCausalLM"],
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(directory)
    return directory


def make_config(root: Path, out: str = "run", **sections: dict[str, Any]) -> Config:
    """Describe a run of a random tiny model on the corpus, in `root`; files are made if missing.

    Nothing of its step is open, unless a section says `auto`.
    """
    (root / "model").mkdir(exist_ok=True)
    if not (root / "model/config.json").exists():
        write_model_config(root / "model")
        write_corpus(root / "corpus.txt")
    raw: dict[str, dict[str, Any]] = {
        "model": {"path": str(root / "model"), "init": "random"},
        "data": {"path": str(root / "corpus.txt"), "seq_len": 32},
        "train": {"steps": 12, "micro_batch_size": 2, "grad_accumulation": 2, "device": "cpu"},
        "optim": {"lr": 1e-2, "warmup_steps": 3},
        # whole layers, so that checkpoints are files of the same names, however planned
        "memory": {"fragments": False, "on_mismatch": "stop"},
        "checkpoint": {"every": 4},
        "log": {"progress": "none"},
    }
    for section, values in sections.items():
        raw.setdefault(section, {}).update(values)
    config = build_config({**raw, "out": str(root / out)})
    sizes = (config.train.micro_batch_size, config.train.grad_accumulation)
    return config if AUTO in (*sizes, config.data.seq_len) else decided(config)


def decided(config: Config) -> Config:
    """Decide what settings leave open of the numbers, as on a CPU, in the smallest micro-batches."""
    rows = with_rows(config, context=None, on_cpu=True)
    return smallest_micro_batches(with_step(rows, on_cpu=True, num_rows=None))


def train_until(config: Config, step: int) -> None:
    """Train up to a step; where more follow, the run is interrupted as it begins the next."""
    step_of = loop.train_step

    def stopped(run: Any) -> Any:
        if run.step == step:
            raise KeyboardInterrupt
        return step_of(run)

    if step == config.train.steps:
        loop.train(config)
        return
    with patch.object(loop, "train_step", stopped), pytest.raises(KeyboardInterrupt):
        loop.train(config)
