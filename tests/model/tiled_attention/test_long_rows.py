"""A row of 20,000 tokens of models whose attention no kernel of a CPU does: the memory that it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from megatrain.model.profile.count import count_anatomy
from tests.host_device import build
from tests.model.tiled_attention.long_row import TOKENS, config_of

FAMILIES = ["gemma2", "gpt_oss", "mistral", "qwen3"]
MOST = 300 << 20
"""Less than a mask of one byte for each pair of the row's tokens, and a tenth of a layer's scores."""


def trained(family: str, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.model.tiled_attention.long_row", family, device]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_row_takes_no_mask_and_no_scores_on_cpu_and_test_device(family: str) -> None:
    assert MOST < TOKENS**2
    build.build_or_skip()
    on_cpu, on_device = (trained(family, device) for device in ("cpu", "host"))
    for found in (on_cpu, on_device):
        assert 0 < found["nbytes"] < MOST
    assert on_device["loss"] == pytest.approx(on_cpu["loss"], rel=1e-6)
    assert on_device["norms"] == pytest.approx(on_cpu["norms"], rel=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_row_is_counted(family: str) -> None:
    """A layer with a window computes less than a tenth of one without, and needs no more memory."""
    config = config_of(family)
    shape: dict[str, Any] = {"micro_batch_size": 1, "seq_len": 1 << 17, "precision": "bf16"}
    anatomy = count_anatomy(config, **shape, attn_implementation="tiled")
    narrow, wide = anatomy.layers[0].forward, anatomy.layers[1].forward
    if family == "qwen3":
        narrow, wide = wide, narrow
        assert wide.attention_bytes == 0, "which sdpa does without a mask"
    if family != "mistral":
        assert narrow.attention_flops < wide.attention_flops / 10
    window = config.sliding_window
    tile = min(512, window)
    pairs = shape["seq_len"] * (window + tile)  # but at the beginning of the row
    assert narrow.attention_flops == pytest.approx(2 * 2 * 16 * pairs, rel=0.05)
    assert narrow.attention_bytes == pytest.approx(
        4 * 2 * pairs * (16 if family == "gemma2" else 10), rel=0.05
    )
    assert max(layer.backward_peak_bytes["recompute"] for layer in anatomy.layers) < 1 << 30
