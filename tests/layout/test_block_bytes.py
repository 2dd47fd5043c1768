"""A block's bytes follow from four numbers, and add up as blocks do."""

from __future__ import annotations

import pytest
import torch

from megatrain.config.optimizers import adamw
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.blocks import ParameterSpec, lay_out


def spec(
    name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, is_trained: bool = True
) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype=dtype, is_trained=is_trained)


PARTS = [
    [spec("a", 10, 30), spec("b", 64, is_trained=False)],
    [spec("c", 300, dtype=torch.float32), spec("d", 7)],
]


def test_a_layout_counts_padding_and_what_is_trained() -> None:
    sizes = [lay_out(parameters).sizes for parameters in PARTS]
    assert sizes[0] == BlockBytes(working_bytes=2 * 384, num_split=320, num_state=320, num_scales=2)
    assert sizes[1] == BlockBytes(working_bytes=2 * 64 + 4 * 320, num_split=64, num_state=384, num_scales=3)


def test_sizes_of_parts_add_up_to_those_of_the_whole() -> None:
    whole = lay_out([parameter for part in PARTS for parameter in part]).sizes
    assert sum((lay_out(part).sizes for part in PARTS), BlockBytes()) == whole


@pytest.mark.parametrize(
    ("moments", "split", "full", "scale"),
    [(adamw.FP32, 26, 28, 0), (adamw.BF16, 18, 20, 0), (adamw.INT8, 14, 16, 16)],
)
def test_an_update_reads_and_writes_masters_and_moments_and_reads_the_gradient(
    moments: Optimizer, split: int, full: int, scale: int
) -> None:
    sizes = BlockBytes(num_split=320, num_state=384, num_scales=5)
    assert sizes.update_bytes(moments) == split * 320 + full * 64 + scale * 5
