"""Runs on rows that are too long for masks, with nothing said of attention: they take tiles by themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, PretrainedConfig

from megatrain.config import Config
from megatrain.config.attention import TILED
from megatrain.errors import ConfigError
from megatrain.model import masks
from megatrain.model.documents import tiled
from megatrain.train import attention
from megatrain.train.loop import train
from tests.train.project import WORDS, make_config, train_until, write_corpus

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gemma2() -> PretrainedConfig:
    return Gemma2Config(architectures=["Gemma2ForCausalLM"], **SMALL, sliding_window=9)


def gpt_oss() -> PretrainedConfig:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssConfig(architectures=["GptOssForCausalLM"], **SMALL, **experts, sliding_window=9)


def llama() -> PretrainedConfig:
    return LlamaConfig(architectures=["LlamaForCausalLM"], **SMALL)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let masks end at 40 tokens; what is returned gets the tokens of each call of attention by tiles."""
    found: list[int] = []
    attend = tiled._by_tiles

    def noted(module: nn.Module, query: Any, *others: Any) -> Any:
        if type(query).__name__ != "FakeTensor" and query.shape[2] > 8:  # a small model that is tried has 8
            found.append(query.shape[2])
        return attend(module, query, *others)

    monkeypatch.setattr(tiled, "_by_tiles", noted)
    monkeypatch.setattr(masks, "MOST_TOKENS", 40)
    monkeypatch.setattr(attention, "MOST_TOKENS", 40)
    return found


def config_in(
    root: Path, model: PretrainedConfig, out: str, seq_len: int, packing: str = "join", **named: Any
) -> Config:
    (root / "model").mkdir(exist_ok=True)
    model.save_pretrained(root / "model")
    write_corpus(root / "corpus.txt")
    rows = [{"text": " ".join(WORDS[: 1 + number % 9])} for number in range(400)]
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    name = "corpus.txt" if packing == "join" else "rows.jsonl"
    return make_config(
        root,
        out,
        model=named,
        data={"path": str(root / name), "packing": packing, "seq_len": seq_len},
        train={"steps": 3, "micro_batch_size": 1},
        optim={"warmup_steps": 1},
        checkpoint={"every": 1},
    )


def weights(root: Path, out: str) -> bytes:
    return (root / out / "hf/model.safetensors").read_bytes()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("make", "packing"), [(gemma2, "join"), (gemma2, "best_fit"), (gpt_oss, "join")])
def test_a_run_takes_tiles_where_a_mask_would_be_too_long_and_resumes_to_the_bit(
    make: Callable[[], PretrainedConfig], packing: str, calls: list[int], tmp_path: Path
) -> None:
    train(config_in(tmp_path, make(), "whole", 64, packing))
    assert set(calls) == {64}
    parted = config_in(tmp_path, make(), "parted", 64, packing)
    train_until(parted, 2)
    train(parted)
    assert weights(tmp_path, "whole") == weights(tmp_path, "parted")


def test_shorter_rows_and_rows_that_need_no_mask_are_as_they_were(calls: list[int], tmp_path: Path) -> None:
    train(config_in(tmp_path, gemma2(), "short", 40))
    train(config_in(tmp_path, llama(), "long", 64))
    train(config_in(tmp_path, llama(), "named", 64, attn_implementation="sdpa"))
    assert not calls
    assert weights(tmp_path, "long") == weights(tmp_path, "named")


def test_what_is_named_stays_refused(calls: list[int], tmp_path: Path) -> None:
    named = config_in(tmp_path, gemma2(), "run", 64, attn_implementation="eager")
    with pytest.raises(ConfigError, match=rf"use model\.attn_implementation={TILED}, which needs none"):
        train(named)
    assert not calls
