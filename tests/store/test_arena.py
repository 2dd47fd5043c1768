"""Memory is taken before it is locked, in pieces, and keeps its content."""

from __future__ import annotations

from pathlib import Path

import torch

from megatrain.hardware.accelerators import Vendor
from megatrain.store.arena import Arena

NBYTES = 96 << 20
"""Two pieces of different sizes."""


def taken_bytes(address: int) -> int:
    """Return the bytes of memory behind addresses from this one on, as far as `NBYTES`."""
    taken, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            start, stop = (int(end, 16) for end in name.split("-"))
            is_ours = start < address + NBYTES and stop > address
        elif name == "Rss:" and is_ours:
            taken += int(values[0]) << 10
    return taken


def test_touching_takes_every_page_and_leaves_its_content() -> None:
    arena = Arena(NBYTES)
    values = arena.view(torch.int64, 0, 1000)
    values.copy_(torch.arange(1000))
    assert taken_bytes(values.data_ptr()) < NBYTES // 2
    arena.touch()
    assert taken_bytes(values.data_ptr()) >= NBYTES
    assert torch.equal(values, torch.arange(1000))
    assert not arena.view(torch.int64, 8000, 1000).any()


def test_the_pages_are_there_when_the_driver_is_asked_to_lock_them() -> None:
    """It takes what is not there in one thread."""
    arena, taken = Arena(NBYTES), []

    def lock(address: int, nbytes: int) -> bool:
        taken.append(taken_bytes(address))
        return nbytes == NBYTES

    assert arena.lock(Vendor(title="test", lock=lock, unlock=lambda address: None))
    assert taken[0] >= NBYTES
