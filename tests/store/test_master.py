import pytest
import torch
from torch import Tensor

from megatrain.store.master import CHUNK_NUMEL, join_master, join_master_into, split_master, split_master_into

EDGES = [
    0x00000000,
    0x80000000,  # -0
    0x00000001,  # the smallest denormal
    0x807FFFFF,  # the largest, negative
    0x00008000,  # a denormal tie
    0x00018000,
    0x80008000,
    0x3F808000,  # 1.00390625: a tie that rounding to even would send down
    0x3F818000,
    0xBF808000,
    0x3F807FFF,
    0x3F808001,
    0x7F7F7FFF,
    0x7F7F8000,  # rounds to an infinite working weight
    0x7F7FFFFF,  # the largest finite number
    0x7F800000,  # inf
    0xFF800000,
    0x7F800001,  # signalling NaN
    0x7FC00000,  # the NaN that arithmetic makes
    0x7FFF8000,  # a NaN whose working weight wraps around to -0
    0x7FFFFFFF,
    0xFFFFFFFF,
]


def patterns(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def every_high_half() -> Tensor:
    """All 65536 high halves with 16 low halves each, those around a tie and a carry among them."""
    lows = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    lows += torch.randint(0x10000, (10,), generator=torch.Generator().manual_seed(0)).tolist()
    high = torch.arange(0x10000, dtype=torch.int64)[:, None] << 16
    return (high | torch.tensor(lows)).flatten().to(torch.int32)


def strided() -> Tensor:
    return (torch.arange(1 << 22, dtype=torch.int64) * 1023 + 511).to(torch.int32)


@pytest.mark.parametrize(
    "bits", [patterns(EDGES), every_high_half(), strided()], ids=["edges", "high", "strided"]
)
def test_joining_restores_every_bit(bits: Tensor) -> None:
    working, remainder = split_master(bits.view(torch.float32))
    assert working.dtype == torch.bfloat16
    assert remainder.dtype == torch.int16
    assert torch.equal(join_master(working, remainder).view(torch.int32), bits)


def test_working_weight_is_nearest_and_ties_go_away_from_zero() -> None:
    bits = every_high_half()
    bits = bits[~bits.view(torch.float32).isnan()]
    working, remainder = split_master(bits.view(torch.float32))
    nearest = bits.view(torch.float32).bfloat16()
    tie = remainder == -0x8000
    assert torch.equal(working[~tie].view(torch.int16), nearest[~tie].view(torch.int16))
    up = (bits[tie] >> 16).to(torch.int16) + 1
    assert torch.equal(working[tie].view(torch.int16), up)


def test_tie_to_even_keeps_its_ulp() -> None:
    working, remainder = split_master(torch.tensor([1.00390625]))
    assert working.item() == 1.0078125
    assert remainder.item() == -0x8000


def test_bf16_weights_have_no_remainder() -> None:
    every = torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    working, remainder = split_master(every.float())
    assert not remainder.any()
    assert torch.equal(working.view(torch.int16), every.view(torch.int16))


@pytest.mark.parametrize("numel", [0, 1, CHUNK_NUMEL - 1, CHUNK_NUMEL, 2 * CHUNK_NUMEL + 3])
def test_given_tensors_are_filled_to_the_last_element(numel: int) -> None:
    master = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    working = torch.full((numel,), torch.nan, dtype=torch.bfloat16)
    remainder = torch.full((numel,), 77, dtype=torch.int16)
    out = torch.full((numel,), torch.nan)
    split_master_into(master, working, remainder)
    join_master_into(working, remainder, out)
    assert torch.equal(out, master)


def test_shape_is_kept() -> None:
    working, remainder = split_master(torch.randn(3, 5))
    assert working.shape == remainder.shape == join_master(working, remainder).shape == (3, 5)


def test_views_into_larger_planes_are_split_in_place() -> None:
    master, working, remainder = (
        torch.randn(64),
        torch.zeros(64, dtype=torch.bfloat16),
        torch.zeros(64).short(),
    )
    split_master_into(master[8:24], working[8:24], remainder[8:24])
    assert torch.equal(join_master(working, remainder)[8:24], master[8:24])
    assert not working[:8].any()
    assert not working[24:].any()
