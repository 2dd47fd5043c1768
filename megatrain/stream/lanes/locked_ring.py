"""Copies between a device and host memory that is not page-locked, through a few buffers that are.

A device copies by itself only what is page-locked, and not for every vendor can torch lock memory that it has
not allocated. So a copy goes piece by piece: while the device moves one, the host copies another. One thread
uses a ring, in its current stream, and waits until the host's side is done: on the way to the device until
the source was read, on the way home until the target has every byte.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

NUM_BUFFERS = 3
"""One under way in each half of a copy, and one between."""
BUFFER_BYTES = 4 << 20
"""A piece: 0.1 ms on a fast link, far more than the launch of a copy takes."""
_LONGEST_NAP_S = 2e-4
"""Between two looks at an event that the host waits for: short beside a block's copy."""


class LockedRing:
    """Page-locked buffers that are used in turn, each when the copy before from or to it is done."""

    def __init__(self, device: torch.device) -> None:
        """Allocate the buffers as torch does for the vendor."""
        self._device = device
        self._buffers = [
            torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)
        ]
        self._events = [torch.Event(device=device) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy flat tensors of one length, one of them on the device; the host converts between dtypes."""
        assert target.ndim == source.ndim == 1
        assert target.numel() == source.numel()
        is_fetch = source.device.type == "cpu"
        dtype = (target if is_fetch else source).dtype
        size = BUFFER_BYTES // dtype.itemsize
        pieces = zip(target.split(size), source.split(size), strict=True)
        if is_fetch:
            for there, here in pieces:
                staged, event = self._next(dtype, here.numel())
                until_done(event)
                staged.copy_(here)
                there.copy_(staged, non_blocking=True)
                event.record(torch.accelerator.current_stream(self._device))
            return
        arriving: deque[tuple[Tensor, Tensor, torch.Event]] = deque()
        for here, there in pieces:
            if len(arriving) == NUM_BUFFERS:
                _land(*arriving.popleft())
            staged, event = self._next(dtype, here.numel())
            staged.copy_(there, non_blocking=True)  # behind the fetches from this buffer: one stream
            event.record(torch.accelerator.current_stream(self._device))
            arriving.append((here, staged, event))
        while arriving:
            _land(*arriving.popleft())

    def _next(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, torch.Event]:
        turn, self._turn = self._turn, (self._turn + 1) % NUM_BUFFERS
        return self._buffers[turn][: numel * dtype.itemsize].view(dtype), self._events[turn]


def until_done(event: torch.Event) -> None:
    """Wait in naps, which leave the core to the optimizer: `torch.Event.synchronize` would spin on CUDA."""
    nap_s = 1e-5
    while not event.query():
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


def _land(here: Tensor, staged: Tensor, event: torch.Event) -> None:
    until_done(event)
    here.copy_(staged)
