from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.optimizers import adamw
from megatrain.optim.adamw.device import (
    UpdateScratch,
    join_on_device,
    multiply_add,
    split_on_device,
    update_on_device,
)
from megatrain.optim.adamw.host import AdamWStep, Planes, update_many
from megatrain.optim.pool import WorkerPool
from megatrain.store.master import join_master, split_master

Triple = tuple[float, ...]

NUM_STEPS = 24
HYPER = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
KINDS = [(True, torch.bfloat16), (True, torch.float32), (False, torch.bfloat16), (False, torch.float32)]
KIND_NAMES = ["split-bf16", "split-fp32", "whole-bf16", "whole-fp32"]
SPECIAL = [
    *(0.0, -0.0, 1e-45, -1e-45, 1e-40, -3e-39, 1.1754944e-38, -1.1754942e-38, 1e-30, -1e-23, 1e-20),
    *(1.0, -1.0, 1e10, 1e18, 1.9e19, -1e30, 3e38, -3.4028235e38, math.inf, -math.inf, math.nan),
]


@pytest.fixture(scope="module")
def pool() -> WorkerPool:
    return WorkerPool(2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def numbers(numel: int, seed: int, low: float, high: float) -> Tensor:
    """Numbers of both signs with sizes from 10**low to 10**high, denormals where float32 has them."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(numel, generator=generator, dtype=torch.float64) * (high - low) + low)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * size).float()


def make_gradient(numel: int, seed: int, dtype: torch.dtype, special: list[float]) -> Tensor:
    """Gradients of all sizes; every seventh is one of `special`, a new one in each step."""
    gradient = numbers(numel, seed, -46, 20 if special else 0)
    if special:
        chosen = gradient[seed % 7 :: 7]
        picks = torch.randint(len(special), chosen.shape, generator=torch.Generator().manual_seed(seed))
        chosen.copy_(torch.tensor(special)[picks])
    return gradient.to(dtype)


def make_planes(numel: int, *, split: bool, gradient: Tensor) -> Planes:
    master = numbers(numel, 1, -44, 3)
    working, remainder = split_master(master) if split else (master, None)
    return Planes(
        working=working,
        remainder=remainder,
        exp_avg=numbers(numel, 2, -46, 2),
        exp_avg_sq=numbers(numel, 3, -46, 2).abs_(),
        gradient=gradient,
    )


def to(planes: Planes, device: torch.device) -> Planes:
    """Copy planes, also where they are on that device already."""
    copies: dict[str, Any] = {"remainder": None}
    for field in dataclasses.fields(planes):
        if (plane := getattr(planes, field.name)) is not None:
            copies[field.name] = plane.to(device, copy=True)
    return Planes(**copies)


def bits(flat: Tensor) -> Tensor:
    """Return the bits, of every NaN the same."""
    flat = flat.cpu()
    return torch.where(flat.isnan(), torch.tensor(math.nan), flat).view(torch.int32)


def assert_equal(actual: Planes, expected: Planes) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(bits(getattr(actual, name)), bits(getattr(expected, name))), name
    assert_same_masters(actual, expected)


def assert_same_masters(actual: Planes, expected: Planes) -> None:
    if expected.remainder is None:
        assert torch.equal(bits(actual.working), bits(expected.working))
        return
    assert actual.remainder is not None
    working, remainder = actual.working.cpu(), actual.remainder.cpu()
    master = join_master(expected.working, expected.remainder)
    assert torch.equal(bits(join_master(working, remainder)), bits(master))
    numeric = ~master.isnan()
    same_working = working.view(torch.int16) == expected.working.view(torch.int16)
    assert (same_working | ~numeric).all()
    assert torch.equal(remainder[numeric], expected.remainder[numeric])
    assert working[~numeric].isnan().all(), "a NaN master must show in the working weight"


def check_steps(
    pool: WorkerPool,
    device: torch.device,
    base: AdamWStep,
    numel: int,
    kind: tuple[bool, torch.dtype],
    *,
    chunk_numel: int = 1 << 24,
    special: list[float] | None = None,
    num_steps: int = NUM_STEPS,
) -> Planes:
    """Update on the host and on the device from one state, new gradients each time; compare each time."""
    split, dtype = kind
    expected = make_planes(numel, split=split, gradient=torch.zeros(numel, dtype=dtype))
    hypers = [
        dataclasses.replace(base, step=step, lr=base.lr * (1 + step / 7)) for step in range(1, num_steps + 1)
    ]
    update = partial(update_on_device, chunk_numel=chunk_numel)
    return follow_the_host(pool, expected, device, hypers, special or [], update, assert_equal)


def follow_the_host(
    pool: WorkerPool,
    expected: Planes,
    device: torch.device,
    hypers: Iterable[AdamWStep],
    special: list[float],
    update: Callable[[list[tuple[AdamWStep, Planes]]], object],
    check: Callable[[Planes, Planes], object],
) -> Planes:
    """Update on the host, and a copy on the device by `update`, new gradients each time; check each time."""
    numel, dtype = expected.gradient.numel(), expected.gradient.dtype
    actual = to(expected, device)
    for hyper in hypers:
        gradient = make_gradient(numel, hyper.step, dtype, special)
        expected = dataclasses.replace(expected, gradient=gradient)
        actual = dataclasses.replace(actual, gradient=gradient.to(device, copy=True))
        update_many(pool, [(hyper, expected)])
        update([(hyper, actual)])
        check(actual, expected)
        assert torch.equal(actual.gradient.cpu().view(torch.uint8), gradient.view(torch.uint8))
    return expected


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("numel", [1, 3, 63, 64, 65, 4096, 20_011])
def test_equals_the_host(
    pool: WorkerPool, device: torch.device, numel: int, kind: tuple[bool, torch.dtype]
) -> None:
    check_steps(pool, device, dataclasses.replace(HYPER, grad_scale=0.37), numel, kind)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_many_elements_in_chunks_equal_the_host(
    pool: WorkerPool, device: torch.device, kind: tuple[bool, torch.dtype]
) -> None:
    check_steps(pool, device, HYPER, 300_032, kind, chunk_numel=70_001, num_steps=4)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_special_gradients_equal_the_host(
    pool: WorkerPool, device: torch.device, kind: tuple[bool, torch.dtype]
) -> None:
    """Infinities, NaNs, zeros of both signs, denormals, and squares that over- and underflow."""
    base = dataclasses.replace(HYPER, lr=0.3)
    finite = [value for value in SPECIAL if math.isfinite(value)]
    planes = check_steps(pool, device, base, 7000, kind, special=finite)
    assert planes.exp_avg_sq.isinf().any()
    planes = check_steps(pool, device, base, 7000, kind, special=SPECIAL, num_steps=3)
    assert planes.exp_avg.isnan().any()


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_decay": 0.0},
        {"lr": 0.0},
        {"lr": 3e-5, "beta2": 0.999, "eps": 1e-6},
        {"lr": 1e3, "weight_decay": 1e-2, "grad_scale": 1e-3},
        {"beta2": 0.9999, "weight_decay": 1.0, "grad_scale": 1 / 3},
        {"eps": 0.0},  # 0 / 0
        {"beta1": 0.5},  # torch's lerp has two forms, and changes over here
        {"beta1": 0.3},
        {"beta1": 0.0},
        {"beta2": 0.0},
        {"beta2": 0.4},
    ],
    ids=str,
)
def test_other_hyper_parameters_equal_the_host(
    pool: WorkerPool, device: torch.device, changes: dict[str, float]
) -> None:
    base = dataclasses.replace(HYPER, **changes)  # type: ignore[arg-type]
    for kind in (KINDS[0], KINDS[3]):
        check_steps(pool, device, base, 5003, kind)


@pytest.mark.parametrize("beta2", [0.9, 0.95, 0.98, 0.999, 0.9999])
def test_late_and_early_bias_corrections_equal_the_host(
    pool: WorkerPool, device: torch.device, beta2: float
) -> None:
    for step in (1, 2, 3, 10, 111, 1000, 12_345, 100_000):
        hyper = dataclasses.replace(HYPER, beta2=beta2, step=step)
        expected = make_planes(30_000, split=False, gradient=numbers(30_000, step, -9, 0))
        actual = to(expected, device)
        update_many(pool, [(hyper, expected)])
        update_on_device([(hyper, actual)])
        assert_equal(actual, expected)


def test_chunks_and_cuts_change_no_bit(device: torch.device) -> None:
    numel = 30_011
    start = make_planes(numel, split=True, gradient=make_gradient(numel, 5, torch.bfloat16, SPECIAL))
    expected = to(start, device)
    update_on_device([(HYPER, expected)])
    for chunk_numel in (1 << 10, 4097, 30_010, 30_011):
        actual = to(start, device)
        update_on_device([(HYPER, actual)], chunk_numel)
        assert_equal(actual, to(expected, torch.device("cpu")))
    actual = to(start, device)
    cuts = [0, 0, 1, 17, 1000, 20_001, numel]
    update_on_device(((HYPER, actual.slice(first, last)) for first, last in itertools.pairwise(cuts)), 6000)
    assert_equal(actual, to(expected, torch.device("cpu")))


def test_no_ranges_is_no_work() -> None:
    update_on_device([])


def test_scratch_takes_the_bytes_it_states() -> None:
    scratch = UpdateScratch.allocate(1000, torch.device("cpu"))
    planes = (scratch.wide, scratch.single, scratch.marks)
    assert sum(plane.nbytes for plane in planes) == 1000 * adamw.FP32.scratch_bytes


def test_wrong_planes_are_refused() -> None:
    planes = make_planes(8, split=True, gradient=torch.zeros(8))
    for changes in (
        {"remainder": None},
        {"gradient": planes.gradient[:7]},
        {"exp_avg": torch.zeros(16)[::2]},
    ):
        with pytest.raises(AssertionError):
            update_on_device([(HYPER, dataclasses.replace(planes, **changes))])
    elsewhere = dataclasses.replace(planes, gradient=torch.zeros(8, device="meta"))
    with pytest.raises(AssertionError, match="gradient is on meta"):
        update_on_device([(HYPER, elsewhere)])
    with pytest.raises(AssertionError, match="not in host memory"):
        update_many(WorkerPool(1), [(HYPER, to(planes, torch.device("meta")))])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_never_waits_for_the_device_and_takes_the_memory_it_states() -> None:
    numel, chunk_numel = 1 << 20, 1 << 18
    planes = to(make_planes(numel, split=True, gradient=torch.zeros(numel)), torch.device("cuda"))
    update_on_device([(HYPER, planes)], chunk_numel)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update_on_device([(HYPER, planes)], chunk_numel)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before <= chunk_numel * adamw.FP32.scratch_bytes + 16 * 1024


def test_split_and_join_equal_the_store_s(device: torch.device) -> None:
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    edges = [
        *(0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000),
        *(0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF, 0x3F808000, 0x3F818000),
    ]
    master = torch.cat([patterns, torch.tensor(edges), torch.tensor(edges) - 2**31]).int().view(torch.float32)
    there = master.to(device, copy=True)
    working = torch.empty(master.numel(), dtype=torch.bfloat16, device=device)
    remainder = torch.empty(master.numel(), dtype=torch.int16, device=device)
    split_on_device(there, working, remainder, scratch=torch.empty_like(there))
    for actual, expected in zip((working, remainder), split_master(master), strict=True):
        assert torch.equal(actual.cpu().view(torch.int16), expected.view(torch.int16))
    joined = torch.empty_like(there)
    join_on_device(working, remainder, joined)
    assert torch.equal(joined.view(torch.int32).cpu(), master.view(torch.int32))
    split_on_device(there, working, remainder, scratch=there)
    assert torch.equal(remainder.cpu(), split_master(master)[1])


def rounded(exact: Fraction) -> float:
    """Round to float32, to nearest, ties to even; not for zero, whose sign a fraction lacks."""
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    nearest = round(size / unit) * unit  # Python rounds fractions to even
    value = float(nearest) if nearest < 2**128 else math.inf
    return math.copysign(value, exact)


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def adversarial_triples(count: int, seed: int) -> list[Triple]:
    """Triples (a, b, c) of float32 values whose a * b + c is hard to round."""
    source = random.Random(seed)

    def odd(num_bits: int) -> int:
        return source.getrandbits(num_bits) | 1 | 1 << (num_bits - 1)

    def number(num_bits: int, low: int, high: int) -> float:
        return math.ldexp(source.choice((-1, 1)) * odd(num_bits), source.randint(low, high) - num_bits)

    triples: list[Triple] = []
    while len(triples) < count:
        case = len(triples) % 8
        a, b = number(source.randint(1, 24), -40, 40), number(source.randint(1, 24), -40, 40)
        product = a * b
        exponent = math.frexp(product)[1]
        if case == 0:  # any sizes
            c = number(24, exponent - 80, exponent + 80)
        elif case == 1:  # cancellation, to a few last places
            c = float32(-product) * (1 + source.randint(-3, 3) * 2.0**-23)
        elif case == 2:  # the product is the middle of two floats, c decides
            a, b = factors_of_25_bits(source)
            c = number(24, -140, 0)
        elif case == 3:  # c and half of its last place, more or less by little
            a = math.ldexp(1 + source.choice((-1, 0, 1)) * 2.0**-23, -24)
            b = source.choice((-1, 1)) * math.ldexp(1 + source.choice((0, 1)) * 2.0**-23, 20)
            c = number(24, 21, 21)
        elif case == 4:  # far below half of the last place
            c = number(24, exponent + 20, exponent + 120)
        elif case == 5:  # denormal results, and results near the smallest normal
            a, b = number(24, -70, -60), number(24, -90, -60)
            c = math.ldexp(source.choice((-1, 1)) * source.getrandbits(source.randint(1, 25)), -149)
        elif case == 6:  # denormal middles, less by 2**-46 of half of the last place: fp64 cannot tell
            a, b = almost_one(source, -75), math.ldexp(1 - 2.0**-23, -75)
            c = math.ldexp(source.choice((-1, 1)) * source.getrandbits(23), -149)
        elif source.random() < 0.1:  # below the middle of the largest float and infinity, by as little
            a, b = almost_one(source, 52), math.ldexp(1 - 2.0**-23, 51)
            c = source.choice((-1, 1)) * (2.0**128 - 2.0**104)
        else:  # overflow, and results near the largest float
            a, b = number(24, 60, 66), number(24, 60, 64)
            c = source.choice((-1, 1)) * (2.0**128 - 2.0**104 * source.randint(1, 3))
        if all(float32(value) == value and math.isfinite(value) for value in (a, b, c)):
            triples.append((a, b, c))
    return triples


def almost_one(source: random.Random, exponent: int) -> float:
    return source.choice((-1, 1)) * math.ldexp(1 + 2.0**-23, exponent)


def factors_of_25_bits(source: random.Random) -> tuple[float, float]:
    """Return two odd numbers whose product takes exactly 25 bits, scaled at random."""
    while True:
        a = source.getrandbits(source.randint(2, 12)) | 1
        low, high = -(-(2**24) // a), (2**25 - 1) // a
        b = source.randint(low, high) | 1
        if 2**24 <= a * b < 2**25 and b < 2**24:
            shift = source.randint(-40, 40)
            return math.ldexp(a * source.choice((-1, 1)), shift), math.ldexp(b, source.randint(-20, 20))


def run_multiply_add(triples: list[Triple], device: torch.device) -> Tensor:
    a, b, c = torch.tensor(triples, dtype=torch.float64).float().T.contiguous().to(device)
    out = torch.empty_like(c)
    multiply_add(a, b, c, out, UpdateScratch.allocate(len(triples), device))
    one = torch.empty(1, device=device)
    for index in range(0, len(triples), 997):  # a number in place of the first factor
        factor = a[index : index + 1].double()
        pick = slice(index, index + 1)
        multiply_add(factor, b[pick], c[pick], one, UpdateScratch.allocate(1, device))
        assert torch.equal(bits(one), bits(out[pick]))
    return out.cpu()


def test_multiply_add_is_rounded_once(device: torch.device) -> None:
    triples = adversarial_triples(6_000, 0)
    actual = run_multiply_add(triples, device)
    double_roundings = 0
    for (a, b, c), result in zip(triples, actual.tolist(), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        expected = rounded(exact) if exact else 0.0
        assert result == expected, (a.hex(), b.hex(), c.hex())
        if exact or not a * b:
            assert math.copysign(1, result) == math.copysign(1, expected)
        double_roundings += float32(a * b + c) != expected
    assert double_roundings > len(triples) / 100, "the triples do not tell one rounding from two"


def test_multiply_add_of_zeros_infinities_and_nans(device: torch.device) -> None:
    """As fp64 does it: one rounding, with nothing to round."""
    triples = list(itertools.product((0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan), repeat=3))
    actual = run_multiply_add(triples, device)
    expected = torch.tensor([a * b + c for a, b, c in triples])
    assert torch.equal(bits(actual), bits(expected))
