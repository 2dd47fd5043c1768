"""Moments in 16 and 8 bits: the kernels against a plain reference, their rounding, and its independence."""

from __future__ import annotations

import dataclasses
import itertools
import math
import platform
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.optim.adamw.device import update_on_device
from megatrain.optim.adamw.host import AdamWStep, Planes, update_many
from megatrain.optim.pool import WorkerPool
from megatrain.optim.updates import rounding_key
from megatrain.store.master import join_master, split_master

HYPER = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
STATES = ("bf16", "int8")
EXTREME = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1e-38, -1e-23, 1e-20, 1.0, 1e10, 1e18, 1.9e19, -1e30, 3e38]


@pytest.fixture(scope="module")
def pool() -> WorkerPool:
    return WorkerPool(2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def hyper_of(step: int, **changes: Any) -> AdamWStep:
    noise = (*rounding_key(0, "weight", step), 0)
    return dataclasses.replace(HYPER, step=step, **{"noise": noise, **changes})


def gradient_of(numel: int, seed: int, dtype: torch.dtype, special: list[float] | None = None) -> Tensor:
    """Gradients of sizes from 1e-7 to 1e-1 within each block; every fifth is one of `special`."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(numel, generator=generator) * 6 - 7)
    gradient = torch.randn(numel, generator=generator) * size
    if special:
        chosen = gradient[seed % 5 :: 5]
        chosen.copy_(torch.tensor(special)[torch.randint(len(special), chosen.shape, generator=generator)])
    return gradient.to(dtype)


def planes_of(state: str, gradient: Tensor, *, split: bool = True) -> Planes:
    numel = gradient.numel()
    working: Tensor = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.02
    remainder = None
    if split:
        working, remainder = split_master(working)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[state]
    scales: dict[str, Tensor] = {}
    if state == "int8":
        count = -(-numel // SCALE_NUMEL)
        scales = {"exp_avg_scale": torch.zeros(count), "exp_avg_sq_scale": torch.zeros(count)}
    moments = {name: torch.zeros(numel, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return Planes(working=working, remainder=remainder, gradient=gradient, **moments, **scales)


def tensors(planes: Planes) -> dict[str, Tensor]:
    fields = ((field.name, getattr(planes, field.name)) for field in dataclasses.fields(planes))
    return {name: plane for name, plane in fields if plane is not None}


def clone(planes: Planes) -> Planes:
    return dataclasses.replace(planes, **{name: plane.clone() for name, plane in tensors(planes).items()})


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether all bits are equal; a NaN is a NaN."""
    actual = actual.cpu()
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    kind = torch.int16 if actual.dtype == torch.bfloat16 else torch.int32
    plain = [torch.where(flat.isnan(), math.nan, flat).view(kind) for flat in (actual, expected)]
    return torch.equal(*plain)


def assert_same(actual: Planes, expected: Planes) -> None:
    for name, plane in tensors(actual).items():
        assert same_bits(plane, getattr(expected, name)), name


# -- a plain reference: one element after the other, in NumPy and Python ------------------------------------


def reference_bits(noise: tuple[int, int, int], index: int) -> int:
    """The 32 random bits of an element, in Python's integers."""
    first, second, base = noise
    index += base
    x = (index & 0xFFFFFFFF) ^ first
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = (x + second + (index >> 32) * 0x9E3779B9) & 0xFFFFFFFF
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def reference_bf16(value: np.float32, random: int) -> int:
    if np.isnan(value):
        return 0x7FC0
    return (int(value.view(np.uint32)) + random) >> 16


def reference_float(code: int, mantissa: int) -> np.float32:
    """What a code without a sign stands for: a float with an offset of 1, less 1."""
    exponent, fraction = divmod(code, 2**mantissa)
    return np.float32(2.0**exponent * (1 + fraction / 2**mantissa) - 1)


def reference_unit(values: np.ndarray, top: float) -> np.float32:
    peak = np.float32(np.nan) if np.isnan(values).any() else np.abs(values).max()
    unit = peak / np.float32(top)
    return np.float32(2.0**-126) if unit < np.float32(2.0**-126) else unit


def reference_code(value: np.float32, inverse: np.float32, random: int, mantissa: int) -> int:
    """The code of a magnitude, rounded so that it is unbiased."""
    number = np.float32(value * inverse) + np.float32(1)
    if np.isnan(number):
        return 0x7F
    bits = int(number.view(np.uint32)) - 0x3F800000
    return min(0x7F, (bits + (random >> (9 + mantissa))) >> (23 - mantissa))


def reference_root_code(root: np.float32, inverse: np.float32, random: int) -> int:
    """The code of a root, rounded so that its square is unbiased."""
    scaled = np.float32(root * inverse)
    number = scaled + np.float32(1)
    if np.isnan(number):
        return 0xFF
    code = (int(number.view(np.uint32)) - 0x3F800000) >> 18
    low, high = reference_float(code, 5), reference_float(code + 1, 5)
    share = np.float32(((random & 0xFFFF) + 0.5) / 2**16)
    distance = np.float32(scaled - low) * np.float32(scaled + low)
    code += int(np.float32((high - low) * (high + low)) * share < distance)
    return min(0xFF, max(code, int(root > 0)))


def read_reference(planes: Planes) -> tuple[Tensor, Tensor]:
    """Return both moments in fp32."""
    if planes.exp_avg.dtype == torch.bfloat16:
        return planes.exp_avg.float(), planes.exp_avg_sq.float()
    assert planes.exp_avg_scale is not None
    assert planes.exp_avg_sq_scale is not None
    means = np.zeros(planes.exp_avg.numel(), np.float32)
    squares = means.copy()
    for index, (mean, root) in enumerate(
        zip(planes.exp_avg.tolist(), planes.exp_avg_sq.tolist(), strict=True)
    ):
        block = index // SCALE_NUMEL
        value = reference_float(mean & 0x7F, 4) * planes.exp_avg_scale.numpy()[block]
        means[index] = -value if mean & 0x80 else value
        value = reference_float(root, 5) * planes.exp_avg_sq_scale.numpy()[block]
        squares[index] = value * value
    return torch.from_numpy(means), torch.from_numpy(squares)


def write_reference(planes: Planes, exp_avg: Tensor, exp_avg_sq: Tensor, noise: tuple[int, int, int]) -> None:
    """Round both moments into their planes."""
    means, squares = exp_avg.numpy(), exp_avg_sq.numpy()
    randoms = [reference_bits(noise, index) for index in range(means.size)]
    if planes.exp_avg.dtype == torch.bfloat16:
        for plane, values, shift in ((planes.exp_avg, means, 16), (planes.exp_avg_sq, squares, 0)):
            rounded = [
                reference_bf16(value, random >> shift & 0xFFFF)
                for value, random in zip(values, randoms, strict=True)
            ]
            plane.view(torch.int16).copy_(torch.tensor(rounded).to(torch.int16))
        return
    assert planes.exp_avg_scale is not None
    assert planes.exp_avg_sq_scale is not None
    roots = np.sqrt(squares)
    for block, start in enumerate(range(0, means.size, SCALE_NUMEL)):
        part = slice(start, start + SCALE_NUMEL)
        unit = reference_unit(means[part], 247.0)
        inverse = np.float32(1) / unit
        planes.exp_avg_scale[block] = float(unit)
        for index, mean in enumerate(means[part], start):
            code = reference_code(np.abs(mean), inverse, randoms[index], 4)
            planes.exp_avg[index] = code | (0x80 if mean < 0 else 0)
        unit = reference_unit(roots[part], 251.0)
        inverse = np.float32(1) / unit
        planes.exp_avg_sq_scale[block] = float(unit)
        for index, root in enumerate(roots[part], start):
            planes.exp_avg_sq[index] = reference_root_code(root, inverse, randoms[index])


def update_reference(pool: WorkerPool, hyper: AdamWStep, planes: Planes) -> None:
    """Read the moments, do an exact step in fp32 (`tests/optim/test_adamw.py`), round the moments."""
    exp_avg, exp_avg_sq = read_reference(planes)
    exact = dataclasses.replace(
        planes, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, exp_avg_scale=None, exp_avg_sq_scale=None
    )
    update_many(pool, [(hyper, exact)])
    with np.errstate(all="ignore"):
        write_reference(planes, exp_avg, exp_avg_sq, hyper.noise)


@pytest.mark.parametrize("special", [None, EXTREME, [math.inf, math.nan, -math.inf, 1.0]])
@pytest.mark.parametrize(("split", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("state", STATES)
def test_kernel_equals_the_reference(
    pool: WorkerPool, state: str, split: bool, dtype: torch.dtype, special: list[float] | None
) -> None:
    """Also with short blocks, zeros, denormals, squares that overflow, and gradients that are not finite."""
    numel = 2 * SCALE_NUMEL + 192
    actual = planes_of(state, gradient_of(numel, 0, dtype), split=split)
    expected = clone(actual)
    for step in range(1, 5):
        gradient = gradient_of(numel, step, dtype, special)
        gradient[-64:] = 0.0  # the padding of a parameter
        hyper = hyper_of(step, grad_scale=0.37, noise=(*rounding_key(3, "w", step), (2**32 - 256) * step))
        actual, expected = (dataclasses.replace(planes, gradient=gradient) for planes in (actual, expected))
        update_many(pool, [(hyper, actual)])
        with np.errstate(all="ignore"):
            update_reference(pool, hyper, expected)
        assert_same(actual, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunk_numel", [1, 1000, 1 << 22])
@pytest.mark.parametrize("special", [None, EXTREME, [math.inf, math.nan, -math.inf, 1.0]])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_device_equals_the_kernel(
    pool: WorkerPool,
    device: torch.device,
    state: str,
    split: bool,
    special: list[float] | None,
    chunk_numel: int,
) -> None:
    numel = 9 * SCALE_NUMEL + 64
    expected = planes_of(state, gradient_of(numel, 0, torch.bfloat16), split=split)
    actual = dataclasses.replace(
        expected, **{name: plane.to(device, copy=True) for name, plane in tensors(expected).items()}
    )
    for step in range(1, 9):
        gradient = gradient_of(numel, step, torch.bfloat16, special)
        hyper = hyper_of(step, noise=(*rounding_key(3, "w", step), 2**32 - 1024))
        expected = dataclasses.replace(expected, gradient=gradient)
        actual = dataclasses.replace(actual, gradient=gradient.to(device))
        update_on_device([(hyper, actual)], chunk_numel)
        update_many(pool, [(hyper, expected)])
        assert_same(actual, expected)


@pytest.mark.parametrize("state", STATES)
def test_threads_and_cuts_change_no_bit(state: str) -> None:
    """However a range is cut into tasks, and on however many threads."""
    numel = 300 * SCALE_NUMEL + 64
    start = planes_of(state, gradient_of(numel, 0, torch.bfloat16))
    expected = clone(start)
    for step in (1, 2):
        update_many(WorkerPool(1), [(hyper_of(step), expected)])
    for num_threads, edges in ((3, [0, numel]), (1, [0, 256, 1024, 1024, 50 * 256, numel])):
        actual = clone(start)
        pool = WorkerPool(num_threads)
        for step in (1, 2):
            ranges = []
            for first, last in itertools.pairwise(edges):
                noise = (*rounding_key(0, "weight", step), first)
                ranges.append((hyper_of(step, noise=noise), actual.slice(first, last)))
            update_many(pool, ranges[::-1])
        pool.close()
        assert_same(actual, expected)


@pytest.mark.parametrize("state", STATES)
def test_every_part_of_the_key_changes_the_rounding(pool: WorkerPool, state: str) -> None:
    """Seed, name, step and position each; the weights of the step itself never."""
    start = planes_of(state, gradient_of(4096, 0, torch.bfloat16))
    keys = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2)]
    noises = [(*rounding_key(*key), 0) for key in keys] + [(*rounding_key(*keys[0]), 4096)]
    results = []
    for noise in noises:
        planes = clone(start)
        update_many(pool, [(hyper_of(1, noise=noise), planes)])
        results.append(planes)
    for left, right in itertools.combinations(results, 2):
        assert torch.equal(left.working, right.working)
        assert not torch.equal(left.exp_avg, right.exp_avg)
        assert not torch.equal(left.exp_avg_sq, right.exp_avg_sq)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", STATES)
def test_rounding_is_unbiased(pool: WorkerPool, state: str) -> None:
    """The mean of 4000 roundings is the exact moment, within 5 standard errors of each of 512 elements.

    The standard error is bound without looking at the samples: a rounding goes to one of two neighbors with
    the probability that its distance asks for, so its variance is (x - low)(high - x). A chance of 6e-7 per
    element, and 6e-4 that any of 1024 fails; the draws are fixed.
    """
    numel, rounds = 2 * SCALE_NUMEL, 4000
    start = planes_of(state, gradient_of(numel, 1, torch.float32).abs_().add_(1e-7), split=False)
    exact = planes_of("fp32", start.gradient, split=False)
    update_many(pool, [(hyper_of(1), exact)])
    sums, lows, highs = None, None, None
    for seed in range(rounds):
        planes = clone(start)
        update_many(pool, [(hyper_of(1, noise=(*rounding_key(seed, "w", 1), 0)), planes)])
        found = torch.stack(decode(planes)).double()
        sums = found if sums is None else sums + found
        lows = found if lows is None else torch.minimum(lows, found)
        highs = found if highs is None else torch.maximum(highs, found)
    assert sums is not None
    assert lows is not None
    assert highs is not None
    expected = torch.stack([exact.exp_avg, exact.exp_avg_sq]).double()
    is_reached = (lows <= expected) & (expected <= highs)
    variance = ((expected - lows) * (highs - expected)).clamp(min=0) / rounds
    # 2^-16 of a step: the random bits; 2^-22 of the largest: the offset of a code in fp32, and units
    error = 5 * variance.sqrt() + (highs - lows) * 2**-16
    error += expected.view(2, -1, SCALE_NUMEL).amax(2, keepdim=True).expand(-1, -1, SCALE_NUMEL).reshape(
        2, -1
    ) * (2**-22 if state == "int8" else 0)
    is_least = torch.zeros_like(is_reached)
    if (
        state == "int8"
    ):  # a positive exp_avg_sq is never rounded to 0: where that is the neighbor, it is biased
        assert planes.exp_avg_sq_scale is not None
        least = (planes.exp_avg_sq_scale / 32).square().repeat_interleave(SCALE_NUMEL)
        is_least[1] = expected[1] < 1.001 * least
        assert (sums / rounds >= expected * 0.999)[is_least].all()
    assert is_least.float().mean() < 0.5
    assert ((sums / rounds - expected).abs() <= error)[~is_least].all()
    is_between = (highs > lows) & ~is_least
    assert is_between.float().mean() > 0.4, "hardly anything was rounded"


def decode(planes: Planes) -> tuple[Tensor, Tensor]:
    """Return both moments in fp32, by the code that devices use."""
    from megatrain.optim.adamw.device_moments import load

    exp_avg, exp_avg_sq = torch.empty(2, planes.exp_avg.numel())
    load(planes, exp_avg, exp_avg_sq)
    return exp_avg, exp_avg_sq


def test_random_bits_are_uniform_and_independent() -> None:
    """Each bit is even, and bits of neighbors, of steps and of both halves do not go together.

    Bounds are 5 standard errors of 2^17 fair coins, about 7e-3 of a correlation.
    """
    from megatrain.optim.adamw.device_moments import random_bits

    count, device = 1 << 17, torch.device("cpu")
    draws = [random_bits((*rounding_key(0, "w", step), 0), count, device) for step in (1, 2)]
    bits = torch.stack([(draws[0] >> place) & 1 for place in range(32)]).double() * 2 - 1
    later = torch.stack([(draws[1] >> place) & 1 for place in range(32)]).double() * 2 - 1
    bound = 5 / math.sqrt(count)
    assert bits.mean(1).abs().max() < bound
    among = bits @ bits.T / count
    assert (among - torch.eye(32)).abs().max() < bound
    for other in (later, *(bits.roll(lag, 1) for lag in (1, 2, 16, 256, 4096))):
        assert (bits @ other.T / count).abs().max() < bound
    assert draws[0].min() >= 0
    assert draws[0].max() < 2**32


def test_int8_keeps_small_and_large_values(pool: WorkerPool) -> None:
    """Six orders of magnitude of gradients in one block: each moment is within half of itself or a 4000th."""
    planes = planes_of("int8", gradient_of(SCALE_NUMEL, 3, torch.float32), split=False)
    exact = planes_of("fp32", planes.gradient, split=False)
    update_many(pool, [(hyper_of(1), planes)])
    update_many(pool, [(hyper_of(1), exact)])
    exp_avg, exp_avg_sq = decode(planes)
    for found, wanted, largest in (
        (exp_avg, exact.exp_avg, 16),
        (exp_avg_sq.sqrt(), exact.exp_avg_sq.sqrt(), 32),
    ):
        peak = wanted.abs().max()
        assert ((found - wanted).abs() <= wanted.abs() / largest * 1.01 + peak / (247 * 16) * 1.01).all()
        assert found[wanted.abs().argmax()] == pytest.approx(
            wanted[wanted.abs().argmax()].item(), rel=1 / largest
        )
    assert ((exp_avg_sq > 0) == (exact.exp_avg_sq > 0)).all()


@pytest.mark.parametrize("state", STATES)
def test_padding_stays_zero(pool: WorkerPool, state: str) -> None:
    planes = planes_of(state, torch.zeros(512, dtype=torch.bfloat16))
    planes.working[300:] = 0
    assert planes.remainder is not None
    planes.remainder[300:] = 0
    for step in range(1, 20):
        planes.gradient[:300] = gradient_of(300, step, torch.bfloat16)
        update_many(pool, [(hyper_of(step), planes)])
    assert not join_master(planes.working, planes.remainder)[300:].any()
    assert not decode(planes)[0][300:].any()


def test_kernels_are_vectorised() -> None:
    """A scalar loop would be right, and several times slower."""
    import numba

    from megatrain.optim.adamw import compressed

    halves, codes, scales = np.zeros(256, np.int16), np.zeros(256, np.uint8), np.zeros(1, np.float32)
    averages = {"update_bf16": (halves, halves), "update_int8": (codes, codes, scales, scales)}
    for name, planes in averages.items():
        compiled = numba.njit(nogil=True, error_model="numpy")(getattr(compressed, name).py_func)
        compiled(HYPER.scalars(), (1, 2, 0), halves, halves, *planes, halves, 0, 256)
        (assembly,) = compiled.inspect_asm().values()
        if platform.machine().lower() in ("x86_64", "amd64"):
            for instruction in ("vsqrtps", "vdivps", "vfmadd", "vpmulld"):
                assert instruction in assembly, f"{name}: {instruction}"
            assert "ymm" in assembly or "zmm" in assembly
        elif platform.machine().lower() in ("aarch64", "arm64"):
            assert any("fsqrt" in line and (".4s" in line or "z" in line) for line in assembly.splitlines())


def test_wrong_planes_are_refused(pool: WorkerPool) -> None:
    codes, bf16 = (planes_of(state, torch.zeros(512, dtype=torch.bfloat16)) for state in ("int8", "bf16"))
    for planes in (
        dataclasses.replace(codes, exp_avg_scale=None),
        dataclasses.replace(codes, exp_avg_sq_scale=torch.zeros(3)),
        dataclasses.replace(codes, exp_avg_sq=torch.zeros(512)),
        dataclasses.replace(bf16, exp_avg_scale=torch.zeros(2), exp_avg_sq_scale=torch.zeros(2)),
        bf16.slice(0, 100),
    ):
        with pytest.raises(AssertionError):
            update_many(pool, [(HYPER, planes)])
    with pytest.raises(AssertionError, match="begins at element 3"):
        update_many(pool, [(dataclasses.replace(HYPER, noise=(0, 0, 3)), bf16)])
