"""Memory is taken before it is locked, in pieces, and keeps its content."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from megatrain.hardware.accelerators import Vendor
from megatrain.store.arena import Arena

NBYTES = 96 << 20
"""Two pieces of different sizes."""


def taken_bytes() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_touching_takes_every_page_and_leaves_its_content() -> None:
    arena = Arena(NBYTES)
    values = arena.view(torch.int64, 0, 1000)
    values.copy_(torch.arange(1000))
    before = taken_bytes()
    arena.touch()
    assert NBYTES - (4 << 20) <= taken_bytes() - before <= NBYTES + (4 << 20)
    assert torch.equal(values, torch.arange(1000))
    assert not arena.view(torch.int64, 8000, 1000).any()


def test_the_pages_are_there_when_the_driver_is_asked_to_lock_them() -> None:
    """It takes what is not there in one thread."""
    arena, grown = Arena(NBYTES), []
    before = taken_bytes()

    def lock(address: int, nbytes: int) -> bool:
        grown.append(taken_bytes() - before)
        return nbytes == NBYTES

    assert arena.lock(Vendor(title="test", lock=lock, unlock=lambda address: None))
    assert grown[0] >= NBYTES - (4 << 20)
