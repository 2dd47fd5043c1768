"""Work of tiles is counted by the first, the second and the last of them."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Literal

import pytest

from megatrain.model.profile import counter
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from tests.families import FAMILIES


def count(family: str, precision: Literal["fp32", "bf16"]) -> Anatomy:
    return count_anatomy(
        FAMILIES[family](),
        micro_batch_size=1,
        seq_len=58,
        precision=precision,
        head_chunk_tokens=None,
        device_type="cpu",
        tile=10,
    )


def without_fused_bytes(anatomy: Anatomy) -> str:
    """Leave out what compiled kernels would write, which depends on how many tiles a buffer is read in."""
    return re.sub(r"fused_bytes=[0-9.]+", "", str(anatomy))


@pytest.mark.parametrize(
    ("family", "precision"),
    [("llama", "fp32"), pytest.param("deepseek_v3", "bf16", marks=pytest.mark.parity)],
)
def test_few_tiles_are_counted_as_all_of_them(
    family: str, precision: Literal["fp32", "bf16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = count(family, precision)
    monkeypatch.setattr(counter, "few_tiles", lambda _: nullcontext())
    every = count(family, precision)
    assert without_fused_bytes(few) == without_fused_bytes(every)
    assert few.layers[0].forward.num_operations > 200  # of six tiles
