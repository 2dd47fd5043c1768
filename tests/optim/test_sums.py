"""Sums over flat gradients: squares against fp64, and additions against torch's, bit for bit."""

import pytest
import torch
from torch import Tensor

from megatrain.layout.ownership import num_chunks
from megatrain.layout.pools import wide_numels
from megatrain.optim.clip import global_norm
from megatrain.optim.pool import WorkerPool
from megatrain.optim.sums import (
    SUM_CHUNK_NUMEL,
    add,
    add_last,
    chunk_squares_on_device,
    squares_on_device,
    sum_of_squares,
    tree_squares_on_device,
    tree_sum,
)
from tests.optim.test_adamw import make_gradient, randn


@pytest.fixture(scope="module")
def pool() -> WorkerPool:
    return WorkerPool(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 32_768, 32_769, 1_000_003])
def test_sum_of_squares_equals_fp64(pool: WorkerPool, numel: int, dtype: torch.dtype) -> None:
    flat = make_gradient(numel, 0, dtype)
    expected = flat.double().square().sum().item()
    assert sum_of_squares(pool, flat) == pytest.approx(expected, rel=1e-12, abs=0)


def test_sum_of_squares_does_not_depend_on_threads() -> None:
    flat = make_gradient(3_000_001, 0, torch.float32)
    assert len({sum_of_squares(WorkerPool(num_threads), flat) for num_threads in (1, 2, 3, 8)}) == 1


def test_sum_of_squares_does_not_overflow_where_the_norm_does_not(pool: WorkerPool) -> None:
    assert sum_of_squares(pool, torch.full((4,), 1e30)) == pytest.approx(4e60)


@pytest.mark.parametrize("position", [0, 40_000, 99_999])
def test_sum_of_squares_keeps_inf_and_nan(pool: WorkerPool, position: int) -> None:
    flat = torch.ones(100_000, dtype=torch.bfloat16)
    flat[position] = -torch.inf
    assert sum_of_squares(pool, flat) == float("inf")
    flat[1234] = torch.nan
    assert str(sum_of_squares(pool, flat)) == "nan"


def squared(parts: list[torch.Tensor], scratch_numel: int) -> float:
    out = torch.full((), torch.nan, dtype=torch.float64)
    squares_on_device(parts, out, torch.full((scratch_numel,), torch.nan, dtype=torch.float64))
    return out.item()


def test_a_device_s_norm_is_the_host_s(pool: WorkerPool) -> None:
    """What a device adds in another order is rounded to the same fp32 norm; it overflows no sooner either."""
    for seed in range(100):
        parts = [make_gradient(70_001, seed, torch.bfloat16), make_gradient(1_000, seed + 1, torch.float32)]
        on_host = global_norm([sum(sum_of_squares(pool, part) for part in parts)])
        for scratch_numel in (100_000, 8_193):
            assert global_norm([squared(parts, scratch_numel)]) == on_host
    assert squared([torch.full((4,), 1e30), torch.zeros(0)], 3) == pytest.approx(4e60)


NUMELS = [1, 15, 16, 17, 64, 32_768, 32_769 + 64, 300_003]


def specials() -> torch.Tensor:
    """Zeros of both signs, subnormal and huge values, ties of rounding to bf16, infinities and NaN."""
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x00000001, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF]
    ties = torch.tensor([bit - (bit >> 31 << 32) for bit in bits], dtype=torch.int32).view(torch.float32)
    plain = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e30, 1e-38, float("inf"), -float("inf"), float("nan")])
    return torch.cat([ties, plain])


def pairs(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gradient and a sum: of all sizes, and every special value with every other."""
    special = specials()
    first, second = torch.cartesian_prod(special, special).unbind(1)
    gradient = torch.cat([make_gradient(numel, 0, dtype), first.to(dtype)])
    return gradient, torch.cat([randn(numel, 7) * 1e-4, second])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal bits; of a NaN only that it is one."""
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    bits = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(found[~is_nan].view(bits), expected[~is_nan].view(bits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", NUMELS)
def test_add_is_torch_s_fp32_addition(pool: WorkerPool, numel: int, dtype: torch.dtype) -> None:
    gradient, sums = pairs(numel, dtype)
    expected = sums.clone().add_(gradient)
    add(pool, gradient, sums)
    assert_same(sums, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", NUMELS)
def test_the_last_addition_rounds_as_torch_does(
    pool: WorkerPool, numel: int, dtype: torch.dtype, rounds: bool
) -> None:
    gradient, sums = pairs(numel, dtype)
    before = sums.clone()
    expected = (sums + gradient).to(torch.bfloat16 if rounds else torch.float32)
    out = torch.empty_like(expected) if rounds else sums
    assert str(add_last(pool, gradient, sums, out)) == str(sum_of_squares(pool, out)) == "nan"
    assert_same(out, expected)
    if rounds:
        assert torch.equal(sums.view(torch.int32), before.view(torch.int32)), "sums are only read"
    numbers = torch.empty(numel, dtype=expected.dtype)
    found = add_last(pool, gradient[:numel], before[:numel], numbers)
    assert found == sum_of_squares(pool, numbers) == sum_of_squares(pool, expected[:numel])


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32])
def test_a_negative_zero_adds_nothing(pool: WorkerPool, gradient: torch.dtype) -> None:
    """What stands for a missing gradient: every sum stays what it was, a negative zero too."""
    sums = specials()
    expected = sums.clone()
    add(pool, torch.full_like(sums, -0.0, dtype=gradient), sums)
    assert_same(sums, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_chunks_on_a_device_do_not_depend_on_how_many_there_are(dtype: torch.dtype) -> None:
    flat = torch.randn(130 * SUM_CHUNK_NUMEL + 77, generator=torch.Generator().manual_seed(3)).to(dtype)
    scratch = torch.full((wide_numels(flat.numel(), True)[0],), torch.nan, dtype=torch.float64)

    def squares(part: Tensor, room: int = len(scratch)) -> Tensor:
        found = torch.empty(num_chunks(part.numel()), dtype=torch.float64)
        chunk_squares_on_device(part, found, scratch[:room])
        return found

    whole = squares(flat)
    assert whole.shape == (131,)
    assert torch.equal(squares(flat, 3 * SUM_CHUNK_NUMEL), whole)
    for cut in (1, 5, 128):
        parts = flat[: cut * SUM_CHUNK_NUMEL], flat[cut * SUM_CHUNK_NUMEL :]
        assert torch.equal(torch.cat([squares(part) for part in parts]), whole)
    out, sums = torch.zeros((), dtype=torch.float64), torch.full((256,), torch.nan, dtype=torch.float64)
    halves = flat[: 7 * SUM_CHUNK_NUMEL], flat[7 * SUM_CHUNK_NUMEL :]
    tree_squares_on_device([halves, [flat[:100]], []], out, scratch, sums)
    assert float(out) == float(tree_sum(whole) + tree_sum(squares(flat[:100])))
    exact = torch.stack([chunk.double().square().sum() for chunk in flat.split(SUM_CHUNK_NUMEL)])
    torch.testing.assert_close(whole, exact, rtol=1e-13, atol=0)
    assert float(tree_sum(whole)) == pytest.approx(float(exact.sum()), rel=1e-13)
    assert float(tree_sum(whole[:0])) == 0.0
    tiny = torch.tensor([1.0, 2.0**-53, 2.0**-53, 2.0**-53], dtype=torch.float64)
    assert float(tree_sum(tiny)) == 1.0 + 2.0**-52  # (1 + 2^-53) + (2^-53 + 2^-53), and nothing else
