"""The rates at which this machine copies, multiplies, attends, updates and reads its memory.

Each function takes how much and how long, and returns a rate that was reached: the one that a quarter of the
repeats exceeded, so that another process that comes and goes does not count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer, num_scales
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.hardware import GIB
from megatrain.hardware.accelerators import vendor_of
from megatrain.optim.pool import WorkerPool
from megatrain.optim.updates import RangePlanes, RangeStep, kernels_of
from megatrain.store.arena import Arena

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRates:
    """Bytes/s of copies between host and device; where the host computes, between two host buffers."""

    h2d_locked: float
    d2h_locked: float
    h2d_pageable: float
    d2h_pageable: float
    both: float
    """Both ways at once, added."""

    @property
    def both_share(self) -> float:
        """Part of each rate that is left while the other goes on too."""
        return min(1.0, self.both / (self.h2d_locked + self.d2h_locked))

    @property
    def pageable_share(self) -> float:
        """Part of the rates that memory which is not page-locked reaches."""
        return min(1.0, (self.h2d_pageable + self.d2h_pageable) / (self.h2d_locked + self.d2h_locked))


def copy_rates(device: torch.device, *, nbytes: int, seconds: float) -> CopyRates:
    """Measure copies of `nbytes`, for about `seconds` each.

    On a CPU nothing is locked and both ways are the same: one rate stands for all four.
    """
    on_device = device.type != "cpu"
    slot, home = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    host, sink = (torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_device) for _ in range(2))
    locked = _rate(device, lambda: slot.copy_(host, non_blocking=True), nbytes, seconds)
    if not on_device:
        with ThreadPoolExecutor(2) as pool:

            def both_ways() -> None:
                back = pool.submit(sink.copy_, home)
                slot.copy_(host)
                back.result()

            both = _rate(device, both_ways, 2 * nbytes, seconds)
        return CopyRates(
            h2d_locked=locked, d2h_locked=locked, h2d_pageable=locked, d2h_pageable=locked, both=both
        )
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    down, up = torch.Stream(device=device), torch.Stream(device=device)

    def on_two_streams() -> None:
        with down:
            slot.copy_(host, non_blocking=True)
        with up:
            sink.copy_(home, non_blocking=True)

    return CopyRates(
        h2d_locked=locked,
        d2h_locked=_rate(device, lambda: sink.copy_(home, non_blocking=True), nbytes, seconds),
        h2d_pageable=_rate(device, lambda: slot.copy_(pageable), nbytes, seconds),
        d2h_pageable=_rate(device, lambda: pageable.copy_(home), nbytes, seconds),
        both=_rate(device, on_two_streams, 2 * nbytes, seconds),
    )


def device_memory_rate(device: torch.device, *, nbytes: int, seconds: float) -> float:
    """Return bytes/s of device memory, read and written together, by a copy within it."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return _rate(device, lambda: target.copy_(source), 2 * nbytes, seconds)


def attention_rates(
    device: torch.device, dtype: torch.dtype, *, tokens: int, width: int, seconds: float
) -> tuple[float, float]:
    """Return FLOP/s of causal attention: of the forward, and of the backward.

    Counted as everywhere in megatrain: the forward is 2 products of tokens x tokens per head at half, and the
    backward 5 of them, as it makes the scores again.

    Args:
        device: where it runs.
        dtype: of queries, keys and values.
        tokens: of the one row.
        width: of a head.
        seconds: for each rate.
    """
    heads = 4 if device.type == "cpu" else 2048 // width
    query, key, value = (
        torch.randn(1, heads, tokens, width, dtype=dtype, device=device).requires_grad_() for _ in range(3)
    )
    ones = torch.ones_like(query)
    product = heads * tokens * tokens * width

    def forward() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), ones)

    with torch.no_grad():
        forward_s = _seconds(device, forward, seconds)
    both_s = _seconds(device, both, seconds)
    backward_s = both_s - forward_s
    # noise may make the difference of two times small, or less than nothing
    return 2 * product / forward_s, 5 * product / max(backward_s, both_s / 4)


def update_rates(
    threads: Iterable[int], *, numel: int, seconds: float, optimizer: Optimizer = DEFAULT
) -> dict[int, float]:
    """Return parameters/s of updates of split masters with bf16 gradients, by number of threads."""
    step = RangeStep(hyper=optimizer.defaults(), count=1)
    planes = RangePlanes(
        working=torch.ones(numel, dtype=torch.bfloat16),
        remainder=torch.zeros(numel, dtype=torch.int16),
        gradient=torch.ones(numel, dtype=torch.bfloat16),
        state={
            name: torch.zeros(plane.numel(numel, num_scales(numel)), dtype=getattr(torch, plane.element))
            for name, plane in optimizer.planes.items()
        },
    )
    kernels = kernels_of(optimizer)
    rates = {}
    for count in threads:
        pool = WorkerPool(count)
        try:
            call = partial(kernels.update_on_host, pool, [(step, planes)])
            rates[count] = _rate(torch.device("cpu"), call, numel, seconds)
        finally:
            pool.close()
    return rates


def lockable_bytes(limit: int, try_lock: Callable[[int], bool]) -> int:
    """Return how much memory could be page-locked at once: 1 GiB, doubled up to a limit.

    Args:
        limit: bytes at most; as much is taken for a moment.
        try_lock: whether so many bytes can be locked, as `can_lock` tries.
    """
    largest, size = 0, GIB
    while size <= limit and try_lock(size):
        largest, size = size, 2 * size
    return largest


def can_lock(device: torch.device, nbytes: int) -> bool:
    """Return whether so much new memory can be page-locked for a device; it is let go at once."""
    arena = Arena(nbytes)
    try:
        return arena.lock(vendor_of(device))
    finally:
        arena.unlock()


def thread_counts(num_cores: int) -> Sequence[int]:
    """Return 1, 2, 4, ... and the number of cores itself."""
    doubled = itertools.takewhile(lambda count: count < num_cores, (1 << power for power in range(12)))
    return (*doubled, num_cores)


def _rate(device: torch.device, call: Callable[[], object], amount: float, seconds: float) -> float:
    """Return `amount` over the time of a call that is at its lower quartile."""
    return amount / _seconds(device, call, seconds)


def _seconds(device: torch.device, call: Callable[[], object], seconds: float) -> float:
    """Return the time of a call that is at its lower quartile, after two to warm up."""
    taken: list[float] = []
    for _ in range(2):
        call()
    _wait(device)
    stop_s = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < stop_s:
        began_s = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - began_s)
    return sorted(taken)[len(taken) // 4]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
