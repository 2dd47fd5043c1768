"""When host buffers are page-locked, and how they grow with rows that become longer."""

from __future__ import annotations

from megatrain.store.arena import Arena
from megatrain.stream.activations.host_ring import HostBuffer, HostRing
from megatrain.stream.lanes import InlineLanes

KIB = 1024


class LockedLanes(InlineLanes):
    """Lanes that note the sizes of the memory that is page-locked."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[int] = []

    def lock(self, arena: Arena | None) -> None:
        assert arena is not None
        self.locked.append(arena.nbytes)

    def unlock(self, arena: Arena | None) -> None:
        assert arena is not None
        if arena.nbytes in self.locked:
            self.locked.remove(arena.nbytes)


def taken(ring: HostRing, *sizes: int) -> list[HostBuffer]:
    found = [ring.take([size])[0] for size in sizes]
    return [buffer for buffer in found if buffer is not None]


def give_back(ring: HostRing, buffers: list[HostBuffer]) -> None:
    for buffer in buffers:
        ring.give_back(buffer)


def test_the_first_step_locks_at_once_and_later_ones_when_the_next_begins() -> None:
    lanes = LockedLanes()
    ring = HostRing(lanes, None)
    ring.begin_step()
    give_back(ring, taken(ring, 8 * KIB, 8 * KIB))
    assert lanes.locked == [8 * KIB, 8 * KIB]
    ring.begin_step()
    give_back(ring, taken(ring, 16 * KIB, 8 * KIB))
    assert lanes.locked == [8 * KIB, 8 * KIB]
    ring.begin_step()
    assert lanes.locked == [8 * KIB, 8 * KIB, 20 * KIB]


def test_a_buffer_that_replaces_smaller_ones_is_a_quarter_longer() -> None:
    ring = HostRing(LockedLanes(), None)
    ring.begin_step()
    give_back(ring, taken(ring, 8 * KIB))
    assert ring.nbytes == 8 * KIB
    give_back(ring, taken(ring, 16 * KIB))
    give_back(ring, taken(ring, 20 * KIB))
    assert ring.nbytes == 28 * KIB


def test_under_a_limit_it_is_as_long_as_asked_for() -> None:
    """The room may be another buffer's."""
    lanes = LockedLanes()
    ring = HostRing(lanes, 32 * KIB)
    ring.begin_step()
    give_back(ring, taken(ring, 8 * KIB, 8 * KIB))
    first, second = taken(ring, 16 * KIB, 16 * KIB)
    assert first.flat.numel() == second.flat.numel() == 16 * KIB
    assert lanes.locked == [16 * KIB, 16 * KIB]


def test_what_is_given_up_before_the_next_step_is_not_locked_then() -> None:
    lanes = LockedLanes()
    ring = HostRing(lanes, None)
    ring.begin_step()
    give_back(ring, taken(ring, 8 * KIB))
    ring.begin_step()
    give_back(ring, taken(ring, 16 * KIB))
    ring.trim()
    ring.begin_step()
    assert lanes.locked == []
    assert ring.nbytes == 0
