"""Gradients in bf16 that add up in fp32 on a device: the kernel in Triton's interpreter has torch's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.hardware.accelerators import VENDORS, Vendor
from megatrain.optim import device_sums
from megatrain.optim.device_sums import KERNEL_NUMEL, add_all, adds_by_kernel, try_kernel
from tests.optim.interpreter import NEEDED, counted, interpreted_on_cpu


def pair(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-40, 30, shape, generator=generator)
    values = torch.randn(shape, generator=generator) * scale
    return torch.randn(shape, generator=generator) * scale.flip(0), values.bfloat16()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let the kernel add on the CPU, in the interpreter, and list the shapes that it adds."""
    pytest.importorskip("triton", reason=NEEDED)
    monkeypatch.setattr(device_sums, "adds_by_kernel", lambda device: True)
    monkeypatch.setattr(device_sums, "KERNEL_NUMEL", 1000)
    added: list[tuple[int, ...]] = []
    launch = device_sums._add_by_kernel

    def noted(total: Tensor, value: Tensor) -> None:
        added.append(tuple(value.shape))
        launch(total, value)

    monkeypatch.setattr(device_sums, "_add_by_kernel", noted)
    return added


def test_the_kernel_adds_large_tensors_with_the_bits_of_torch(by_kernel: list[tuple[int, ...]]) -> None:
    """Small ones, those with gaps, and those that need no cast are torch's."""
    with interpreted_on_cpu():
        pairs = [pair(40, 60), pair(7), pair(5001, seed=1), pair(2048, seed=2), pair(40, 61, seed=3)]
        pairs += [(pair(50, 40)[0].t(), pair(40, 50)[1]), (pair(50, 40)[0], pair(40, 50)[1].t())]
        pairs.append((pair(3000)[0], pair(3000, seed=5)[0]))
        expected = [total + value for total, value in pairs]
        sums = [total.clone() for total, _ in pairs]
        for total, (given, _) in zip(sums, pairs, strict=True):
            assert total.is_contiguous() == given.is_contiguous()
        add_all(sums, [value for _, value in pairs])
        assert by_kernel == [(40, 60), (5001,), (2048,), (40, 61)]
        for total, wanted in zip(sums, expected, strict=True):
            assert torch.equal(bits(total), bits(wanted))


def test_each_sum_is_read_once_and_written_once(by_kernel: list[tuple[int, ...]]) -> None:
    with interpreted_on_cpu(), counted() as found:
        total, value = pair(5001)
        add_all([total], [value])
    assert by_kernel == [(5001,)]
    assert (found.loaded, found.stored) == (6 * 5001, 4 * 5001)


def test_the_trial_tells_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason=NEEDED)
    with interpreted_on_cpu():
        assert try_kernel(torch.device("cpu"))
        monkeypatch.setattr(device_sums, "_add_by_kernel", lambda total, value: total.add_(value.half()))
        assert not try_kernel(torch.device("cpu"))


def test_a_kernel_that_fails_leaves_the_sums_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason=NEEDED)
    assert not adds_by_kernel(torch.device("cpu"))
    kind = "meta"
    monkeypatch.setitem(VENDORS, kind, Vendor(title="Test", collectives="none", triton={}))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    device_sums.why_not_by_kernel.cache_clear()
    assert not adds_by_kernel(torch.device(kind))
    assert "gradients on the device are added up by torch's operations" in caplog.text
    device_sums.why_not_by_kernel.cache_clear()


def test_without_a_kernel_all_are_added_together() -> None:
    total, value = pair(KERNEL_NUMEL // 100, 100)
    expected = total + value
    add_all([total], [value])
    assert torch.equal(bits(total), bits(expected))
    add_all([], [])
