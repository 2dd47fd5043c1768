"""Host memory for saved activations: buffers of exact sizes, page-locked once and used step after step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.layout import pools
from megatrain.layout.host_buffers import OFFLOAD_ALIGNMENT
from megatrain.plan.program.kinds import Lane
from megatrain.store.arena import Arena
from megatrain.stream.lanes import Lanes


@dataclass(eq=False, slots=True)
class HostBuffer:
    """Host memory for one visit at a time. `index` names it, and the visit's device memory, to the lanes."""

    index: int
    arena: Arena
    flat: Tensor
    """(nbytes,) uint8."""

    @classmethod
    def make(cls, lanes: Lanes, index: int, nbytes: int, *, locks: bool = True) -> HostBuffer:
        """Allocate a buffer, page-locked or (not `locks`) not yet."""
        arena = Arena(nbytes)
        if locks:
            lanes.lock(arena)
        return cls(index, arena, arena.view(torch.uint8, 0, nbytes))

    def unmake(self, lanes: Lanes) -> None:
        """Give the memory back, once the copies that use it are done."""
        with lanes.using(Lane.CALLER, writes=[("offloaded", self.index)]):
            lanes.unlock(self.arena)
            self.arena.drop()


class HostRing:
    """Host buffers of exact sizes that are used again and again.

    A request takes the smallest free buffer that holds it. The requests of a step in which nothing is given
    back before all are made find, in the next step, exactly the buffers that they made in the first. Where
    free buffers are too small, since rows have become longer, a new one is a quarter longer than asked for;
    under a limit it is not, since that room may be another buffer's.

    Page-locking takes seconds, and the device idles meanwhile. So the buffers of the first step are locked as
    they are made, and later ones when the next step begins: until then their copies pass a `LockedRing`.
    """

    def __init__(self, lanes: Lanes, limit_bytes: int | None) -> None:
        """Start with no memory, and take at most `limit_bytes` (None: any number)."""
        self._lanes = lanes
        self._limit = limit_bytes
        self._free: list[HostBuffer] = []
        self._num_made = 0
        self._is_later_step = False
        self._unlocked: list[HostBuffer] = []
        self.nbytes = 0

    def begin_step(self) -> None:
        """Page-lock what was made since the last step began; what this step makes waits for the next."""
        for buffer in self._unlocked:
            self._lanes.lock(buffer.arena)
        self._unlocked.clear()
        self._is_later_step = self._num_made > 0

    def take(self, sizes: Sequence[int]) -> tuple[HostBuffer | None, list[int | None]]:
        """Find one buffer for parts of these sizes.

        Returns:
            The buffer (None if not one part fits), and for every part its byte offset there, or None where
            the limit leaves no room for it.
        """
        nbytes = pools.saved_visit(sizes)
        buffer = self._smallest(nbytes) or self._make(nbytes) or self._make_do(sizes)
        return buffer, offsets_of(sizes, 0 if buffer is None else buffer.flat.numel())

    def give_back(self, buffer: HostBuffer) -> None:
        """Make a buffer free; who takes it next waits, by its name, for who has used it."""
        self._free.append(buffer)

    def trim(self) -> None:
        """Give the memory of all free buffers back."""
        for buffer in list(self._free):
            self._unmake(buffer)

    def _smallest(self, nbytes: int) -> HostBuffer | None:
        found = min(
            (buffer for buffer in self._free if buffer.flat.numel() >= nbytes),
            key=lambda buffer: buffer.flat.numel(),
            default=None,
        )
        if found is not None:
            self._free.remove(found)
        return found

    def _make(self, nbytes: int) -> HostBuffer | None:
        """Make a new buffer, in place of free ones if need be: rows have become longer."""
        if self._limit is not None:
            in_use = self.nbytes - sum(buffer.flat.numel() for buffer in self._free)
            if in_use + nbytes > self._limit:
                return None
            while self.nbytes + nbytes > self._limit:
                self._unmake(min(self._free, key=lambda buffer: buffer.flat.numel()))
        elif self._free:
            nbytes += nbytes // 4
        made = HostBuffer.make(self._lanes, self._num_made, nbytes, locks=not self._is_later_step)
        self._unlocked += [made] if self._is_later_step else []
        self.nbytes += made.flat.numel()
        self._num_made += 1
        return made

    def _unmake(self, buffer: HostBuffer) -> None:
        self._free.remove(buffer)
        self.nbytes -= buffer.flat.numel()
        self._unlocked = [other for other in self._unlocked if other is not buffer]
        buffer.unmake(self._lanes)

    def _make_do(self, sizes: Sequence[int]) -> HostBuffer | None:
        """Find the buffer that holds most of what does not fit as a whole: a free one, or all the room."""
        assert self._limit is not None
        room = filled(sizes, self._limit - self.nbytes)
        held = [filled(sizes, buffer.flat.numel()) for buffer in self._free]
        if room > max(held, default=0):
            return self._make(room)
        if not any(held):
            return None
        return self._smallest(
            min(b.flat.numel() for b, n in zip(self._free, held, strict=True) if n == max(held))
        )


def offsets_of(sizes: Iterable[int], capacity: int) -> list[int | None]:
    """Lay parts out in a buffer in order, and leave out what does not fit."""
    offsets: list[int | None] = []
    stop = 0
    for size in sizes:
        aligned = -(-size // OFFLOAD_ALIGNMENT) * OFFLOAD_ALIGNMENT
        fits = stop + aligned <= capacity
        offsets.append(stop if fits else None)
        stop += aligned if fits else 0
    return offsets


def filled(sizes: Sequence[int], capacity: int) -> int:
    """Count the bytes that those of these parts fill that fit into a buffer."""
    offsets = offsets_of(sizes, capacity)
    return pools.saved_visit(size for size, offset in zip(sizes, offsets, strict=True) if offset is not None)
