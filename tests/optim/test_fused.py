"""AdamW as one Triton kernel, in Triton's interpreter: every bit is the host's, and every byte moves once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from megatrain.config.optimizers import adamw
from megatrain.config.optimizers.optimizer import SCALE_NUMEL, Optimizer, num_scales
from megatrain.hardware.accelerators import VENDORS, Vendor
from megatrain.layout.block_bytes import BlockBytes
from megatrain.optim.adamw import fused
from megatrain.optim.adamw.device import update_on_device
from megatrain.optim.adamw.fused import update_fused
from megatrain.optim.adamw.host import AdamWStep, Planes
from megatrain.optim.pool import WorkerPool
from megatrain.optim.updates import rounding_key
from megatrain.store.master import split_master
from tests.optim.interpreter import NEEDED, counted, interpreted, interpreted_on_cpu
from tests.optim.test_compressed import same_bits
from tests.optim.test_device import (
    HYPER,
    SPECIAL,
    assert_same_masters,
    follow_the_host,
    numbers,
    to,
)

FORMATS = [
    (moments, split, gradient)
    for moments in adamw.FORMATS
    for split in (True, False)
    for gradient in (torch.float32, torch.bfloat16)
]
DTYPES = {
    adamw.FP32: torch.float32,
    adamw.BF16: torch.bfloat16,
    adamw.INT8: torch.uint8,
}


def name_of(value: object) -> str | None:
    if isinstance(value, tuple):
        moments, split, gradient = value
        return f"{moments.state}-{'split' if split else 'whole'}-{str(gradient).removeprefix('torch.')}"
    return None


@pytest.fixture(scope="module")
def pool() -> WorkerPool:
    return WorkerPool(2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    pytest.importorskip("triton", reason=NEEDED)
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        yield torch.device("cuda")
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here: the kernel runs on the device")
    with interpreted():
        yield torch.device("cpu")


def planes_of(numel: int, moments: Optimizer, *, split: bool, gradient: Tensor) -> Planes:
    """Planes of numbers of all sizes; codes and their scales are any."""
    generator = torch.Generator().manual_seed(numel)
    master = numbers(numel, 1, -44, 3)
    working, remainder = split_master(master) if split else (master, None)
    mean, square = numbers(numel, 2, -46, 2), numbers(numel, 3, -46, 2).abs_()
    scales: dict[str, Tensor] = {}
    if moments is adamw.INT8:
        mean, square = torch.randint(256, (2, numel), generator=generator)
        for number, name in enumerate(("exp_avg_scale", "exp_avg_sq_scale")):
            scales[name] = numbers(num_scales(numel), 4 + number, -38, 2).abs_()
    return Planes(
        working=working,
        remainder=remainder,
        exp_avg=mean.to(DTYPES[moments]),
        exp_avg_sq=square.to(DTYPES[moments]),
        gradient=gradient,
        **scales,
    )


def assert_same(actual: Planes, expected: Planes) -> None:
    assert_same_masters(actual, expected)
    for name in adamw.INT8.planes:
        if (plane := getattr(expected, name)) is not None:
            assert same_bits(getattr(actual, name), plane), name


def check_steps(
    pool: WorkerPool,
    device: torch.device,
    form: tuple[Optimizer, bool, torch.dtype],
    numel: int,
    *,
    base: AdamWStep = HYPER,
    special: list[float] | None = None,
    num_steps: int = 3,
    rows: int = 4,
) -> Planes:
    """Update on the host and by the kernel from one state, new gradients each time; compare each time."""
    moments, split, dtype = form
    expected = planes_of(numel, moments, split=split, gradient=torch.zeros(numel, dtype=dtype))
    hypers = []
    for step in range(1, num_steps + 1):
        noise = (*rounding_key(3, "w", step), (2**32 - 1024) * (step - 1))
        hypers.append(dataclasses.replace(base, step=step, lr=base.lr * (1 + step / 7), noise=noise))
    update = partial(update_fused, rows=rows)
    return follow_the_host(pool, expected, device, hypers, special or [], update, assert_same)


FP32_TAILS = (1, 63, 65, 257, 3000)
COMPRESSED_TAILS = (64, 256, 320, 3008)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_equals_the_host(
    pool: WorkerPool, device: torch.device, form: tuple[Optimizer, bool, torch.dtype]
) -> None:
    """Ranges that end within a row and within a program, with moments and masters of all sizes."""
    for numel in FP32_TAILS if form[0] is adamw.FP32 else COMPRESSED_TAILS:
        check_steps(pool, device, form, numel, base=dataclasses.replace(HYPER, grad_scale=0.37), num_steps=2)


@pytest.mark.parity
@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_a_million_random_and_special_numbers_equal_the_host(
    pool: WorkerPool, device: torch.device, form: tuple[Optimizer, bool, torch.dtype]
) -> None:
    """Every seventh gradient is zero, denormal or huge, and in a step from the start infinite or NaN."""
    is_exact = form[0] is adamw.FP32
    # squares that overflow leave a NaN for a scale, and with it a whole block
    most = 1e18 if form[0] is adamw.INT8 else 3e38
    finite = [value for value in SPECIAL if abs(value) <= most]
    numel, base = 1_000_000 if is_exact else 1_000_064, dataclasses.replace(HYPER, lr=0.3)
    planes = check_steps(pool, device, form, numel, base=base, special=finite, rows=256, num_steps=2)
    assert planes.working.isfinite().float().mean() > 0.5
    assert ((planes.working != 0) & (planes.working.abs() < 2**-126)).any()
    planes = check_steps(pool, device, form, numel, base=base, special=SPECIAL, rows=256, num_steps=1)
    assert planes.working.isnan().any()


@pytest.mark.parity
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[6], FORMATS[9]], ids=name_of)
@pytest.mark.parametrize(
    "changes",
    [
        {"weight_decay": 0.0},
        {"lr": 0.0},
        {"lr": 3e-5, "beta2": 0.999, "eps": 1e-6},
        {"beta2": 0.9999, "weight_decay": 1.0, "grad_scale": 1 / 3},
        {"eps": 0.0},  # 0 / 0
        {"beta1": 0.5},  # torch's lerp has two forms, and changes over here
        {"beta1": 0.3},
        {"beta1": 0.0},
        {"beta2": 0.0},
    ],
    ids=str,
)
def test_other_hyper_parameters_equal_the_host(
    pool: WorkerPool,
    device: torch.device,
    changes: dict[str, float],
    form: tuple[Optimizer, bool, torch.dtype],
) -> None:
    base = dataclasses.replace(HYPER, **changes)  # type: ignore[arg-type]
    check_steps(pool, device, form, 5056, base=base, rows=16)


def test_equals_torch_s_operations_and_leaves_neighbors_alone(device: torch.device) -> None:
    """Several ranges of one set of planes: what lies between and behind them is as it was."""
    numel = 6 * SCALE_NUMEL
    for moments in adamw.FORMATS:
        start = planes_of(numel, moments, split=True, gradient=numbers(numel, 5, -9, 0))
        actual, expected = to(start, device), to(start, device)
        cuts = [(0, 64), (256, 256), (512, 1024 + 64)]
        fused_ranges = [(HYPER, actual.slice(first, last)) for first, last in cuts]
        update_fused(fused_ranges)
        update_on_device([(HYPER, expected.slice(first, last)) for first, last in cuts])
        assert_same(actual, to(expected, torch.device("cpu")))
        assert torch.equal(
            actual.exp_avg[64:512].cpu().view(torch.uint8), start.exp_avg[64:512].view(torch.uint8)
        )


def test_a_nan_of_any_bits_stays_one(device: torch.device) -> None:
    """That of NVIDIA, 0x7fffffff, would round to a working weight of -0.0."""
    planes = planes_of(64, adamw.FP32, split=True, gradient=torch.ones(64))
    assert planes.remainder is not None
    planes.working.view(torch.int16).fill_(-0x8000)
    planes.remainder.fill_(-1)
    there = to(planes, device)
    update_fused([(HYPER, there)])
    assert there.remainder is not None
    assert there.working.isnan().all()
    assert (there.working.view(torch.int16) == 0x7FC0).all()
    assert (there.remainder == 0).all()


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_planned_bytes_are_those_loaded_and_stored(form: tuple[Optimizer, bool, torch.dtype]) -> None:
    """What the planner prices, for each format; gradients in bf16, which no block there has, are 2 less."""
    moments, split, dtype = form
    numel = 5 * SCALE_NUMEL + 64
    planes = planes_of(numel, moments, split=split, gradient=numbers(numel, 5, -9, 0).to(dtype))
    with interpreted_on_cpu(), counted() as found:
        update_fused([(HYPER, planes)])
    sizes = BlockBytes(num_split=numel if split else 0, num_state=numel, num_scales=num_scales(numel))
    narrower = 0 if dtype is torch.float32 else 2 * numel
    assert found.loaded + found.stored == sizes.fused_update_bytes(moments) - narrower
    written = 4 * numel + sizes.optimizer_bytes(moments)
    assert found.stored == written


def test_bytes_per_parameter() -> None:
    per_param = {
        moments: BlockBytes(num_split=256, num_state=256, num_scales=1).fused_update_bytes(moments) / 256
        for moments in adamw.FORMATS
    }
    assert per_param == {adamw.FP32: 28, adamw.BF16: 20, adamw.INT8: 16.0625}


# -- where it runs -------------------------------------------------------------------------------------------


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that counts as an accelerator on which Triton runs, and nothing known of it."""
    pytest.importorskip("triton", reason=NEEDED)
    monkeypatch.setitem(VENDORS, "cpu", Vendor(title="test", triton={}))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    fused.why_not_fused.cache_clear()
    yield
    fused.why_not_fused.cache_clear()


def test_a_kernel_with_the_right_bits_is_used(tried: None) -> None:
    with interpreted_on_cpu():
        assert fused.why_not_fused("cpu") is None


def test_a_kernel_with_other_bits_is_not_used(tried: None, caplog: pytest.LogCaptureFixture) -> None:
    """Such as those of a multiply-add that rounds twice: the interpreter's own."""
    with interpreted_on_cpu():
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr("tests.optim.interpreter.multiply_add", lambda a, b, c: a * b + c)
        reason = fused.why_not_fused("cpu")
        monkeypatch.undo()
        assert reason == "Triton's kernel gives other bits than torch's operations"
        assert fused.why_not_fused("cpu") == reason
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith(reason + ": blocks on the device are updated by torch's")


@pytest.mark.parametrize("moments", ["bf16", "codes"])
def test_wrong_roundings_of_compressed_moments_are_noticed(
    tried: None, monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    """By the key: another one rounds otherwise."""

    def update(ranges: list[tuple[AdamWStep, Planes]]) -> None:
        ((hyper, planes),) = ranges
        is_one = planes.has_codes == (moments == "codes")
        wrong = dataclasses.replace(hyper, noise=(1, 3, 0))
        update_fused([(wrong if is_one else hyper, planes)])

    with interpreted_on_cpu():
        assert fused._try(torch.device("cpu"))
        monkeypatch.setattr(fused, "update_fused", update)
        assert not fused._try(torch.device("cpu"))


def test_a_kernel_that_fails_is_not_used(
    tried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler\nwas found")

    monkeypatch.setattr(fused, "update_fused", fail)
    assert fused.why_not_fused("cpu") == "Triton's kernel fails (RuntimeError: no compiler)"
    assert len(caplog.records) == 1


def test_where_triton_is_not_used_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fused.why_not_fused.cache_clear()
    assert fused.why_not_fused("xpu") == "Triton is not used on xpu"
    assert not fused.fuses_updates(torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert fused.why_not_fused("cuda") == "Triton is not installed"
    fused.why_not_fused.cache_clear()
    assert not caplog.records
