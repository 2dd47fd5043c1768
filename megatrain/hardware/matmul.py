"""The rate at which a device multiplies matrices."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

from megatrain.hardware.accelerators import free_bytes, give_back_memory

if TYPE_CHECKING:
    import torch


def measure_matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product, measured once per process: what 100 % of MFU means.

    It is what the device reaches here, with the threads and settings of now, and not what its vendor
    promises. Takes up to 0.2 s on a CPU and 1 s on a GPU, and 0.8 GB there at most; waits for the device, so
    it is not for the inside of a step. Draws from no generator of the caller's.
    """
    import torch

    return _matmul_peak(device, dtype, torch.get_num_threads(), torch.get_float32_matmul_precision())


@cache
def _matmul_peak(device: torch.device, dtype: torch.dtype, num_threads: int, precision: str) -> float:
    """Double the size until a product takes long enough to show the peak, then take the best of a few."""
    import torch

    is_cpu = device.type == "cpu"
    size = 512
    largest, long_enough_s, budget_s = (2048, 4e-3, 0.1) if is_cpu else (8192, 1e-3, 0.5)
    if not is_cpu and free_bytes(device) < 1 << 30:
        largest = 4096
    generator = torch.Generator(device).manual_seed(0)
    started_s, best = time.perf_counter(), 0.0
    with torch.no_grad():
        while True:
            # random: a product of constants switches fewer transistors, and runs faster than any real one
            left, right = (
                torch.randn(size, size, generator=generator, dtype=dtype, device=device) for _ in range(2)
            )
            # as a linear layer multiplies, and as its weight's gradient does: one may be many times faster
            pairs = [(left, right.t()), (left.t(), right)]
            # twice on an accelerator: the first product of a kind loads its kernel, which takes far longer
            seconds = min(_product_s(*pair) for _ in range(1 if is_cpu else 2) for pair in pairs)
            best = max(best, 2 * size**3 / seconds)
            if size >= largest or seconds >= long_enough_s:
                break
            size *= 2
        while time.perf_counter() - started_s < budget_s:
            best = max(best, *(2 * size**3 / _product_s(*pair) for pair in pairs))
    if not is_cpu:
        del left, right, pairs
        give_back_memory(device)  # an engine that fills the device asks what is free
    return best


def _product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the seconds of a product: of one on a CPU, of each of some on a device that runs behind."""
    repeats = 1 if left.device.type == "cpu" else 4
    _synchronize(left)
    began_s = time.perf_counter()
    for _ in range(repeats):
        left.mm(right)
    _synchronize(left)
    return (time.perf_counter() - began_s) / repeats


def _synchronize(tensor: torch.Tensor) -> None:
    import torch

    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
