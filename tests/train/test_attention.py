"""Which attention a run asks for where no setting names one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.attention import (
    BY_DOCUMENT,
    EITHER_WHERE_ABLE,
    MOST_TOKENS,
    TILED_WHERE_ABLE,
    WHERE_ABLE,
)
from megatrain.hardware.machines import load_machine
from megatrain.train.attention import attention_of, why_masked
from megatrain.train.planning.counting import device_type, shape_of
from tests.train.project import make_config, write_corpus, write_model_config


@pytest.mark.parametrize(
    ("sections", "has_varlen", "reason"),
    [
        ({}, True, None),
        ({}, False, "device=cpu"),
        ({"train": {"precision": "fp32"}}, True, "train.precision=fp32"),
        ({"train": {"deterministic": True}}, True, "train.deterministic=true"),
    ],
)
def test_varlen_is_asked_for_where_it_can_be(
    tmp_path: Path, sections: dict[str, dict[str, Any]], has_varlen: bool, reason: str | None
) -> None:
    train = {"precision": "bf16", **sections.get("train", {})}
    config = make_config(tmp_path, train=train)
    assert why_masked(config, has_varlen=has_varlen) == reason
    assert attention_of(config, has_varlen=has_varlen) == (WHERE_ABLE if reason is None else None)
    for name in ("sdpa", BY_DOCUMENT):
        named = make_config(tmp_path, train=train, model={"attn_implementation": name})
        assert attention_of(named, has_varlen=has_varlen) == name


def test_a_plan_counts_no_mask_where_the_run_makes_none(tmp_path: Path) -> None:
    config = make_config(tmp_path, train={"precision": "bf16"})
    h100 = load_machine("h100")
    kinds = [
        device_type(h100),
        device_type(replace(h100, device="AMD Instinct MI300X")),
        device_type(replace(h100, device="cpu")),
    ]
    assert kinds == ["accelerator", "accelerator with masks", "cpu"]
    asked = [shape_of(config, kind, packing="best_fit")["attn_implementation"] for kind in kinds]
    assert asked == [WHERE_ABLE, None, None]
    assert shape_of(config, "accelerator", packing="join")["attn_implementation"] is None


@pytest.mark.parametrize(("seq_len", "is_long"), [(64, False), (MOST_TOKENS, False), (MOST_TOKENS + 1, True)])
def test_tiles_are_asked_for_where_rows_are_longer_than_masks(
    tmp_path: Path, seq_len: int, is_long: bool
) -> None:
    write_model_config(tmp_path / "model", max_position_embeddings=1 << 20)
    write_corpus(tmp_path / "corpus.txt")
    config = make_config(tmp_path, train={"precision": "bf16"}, data={"seq_len": seq_len})
    assert attention_of(config, has_varlen=False) == (TILED_WHERE_ABLE if is_long else None)
    assert attention_of(config, has_varlen=True) == (EITHER_WHERE_ABLE if is_long else WHERE_ABLE)
    for other, asked in ((64, None), (1 << 17, TILED_WHERE_ABLE)):  # as the longest row is looked for
        assert shape_of(config, "cpu", seq_len=other)["attn_implementation"] == asked
    named = make_config(tmp_path, data={"seq_len": seq_len}, model={"attn_implementation": "sdpa"})
    assert attention_of(named, has_varlen=False) == "sdpa"
