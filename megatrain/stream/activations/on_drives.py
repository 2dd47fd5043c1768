"""Saved activations on their way to drives and back: a few host buffers, and room on the drives for the rest.

A visit has a buffer while it leaves (a save fills it, a stow writes it out) and while it comes back (a recall
reads it in, a restore copies it on); between these its bytes are on the drives alone. What must stay true:
between these two nobody else is given the buffer. All else follows from the names: ("offloaded", n) of a
buffer, ("scratch", n) of a chunk on the drives.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.errors import CapacityError
from megatrain.hardware import GIB
from megatrain.layout import pools
from megatrain.layout.host_buffers import NUM_ACTIVATION_STAGING
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.store.drives.scratch import Place, ScratchFiles
from megatrain.stream.activations.host_ring import HostBuffer, offsets_of
from megatrain.stream.lanes import Lanes


@dataclass(eq=False, slots=True)
class Staged:
    """One visit's bytes: in a host buffer, on the drives, or both."""

    index: int
    """Names the visit's device memory to the lanes."""
    place: Place
    buffer: HostBuffer | None
    """None: on the drives alone."""
    is_stowed: bool = False
    """They are on the drives, or will be when their lane has done what it was given."""

    @property
    def chunks(self) -> list[Buffer]:
        """Name the room on the drives."""
        return [("scratch", chunk) for chunk in self.place.chunks]


class Staging:
    """The host buffers before the drives, and the places behind them."""

    def __init__(
        self, lanes: Lanes, scratch: ScratchFiles, limit_bytes: int | None, *, moved: tuple[int, int] = (0, 0)
    ) -> None:
        """Start with no memory, and take at most `limit_bytes` (None: any number).

        `moved` bytes were read from drives and written to them before.
        """
        self._lanes = lanes
        self._scratch = scratch
        self._limit = limit_bytes
        self._buffer_bytes = 0
        self._free: deque[HostBuffer] = deque()
        self._recalled: list[Staged] = []
        """Read ahead of their restore, in order."""
        self._free_indices: list[int] = []
        self._num_indices = 0
        self._read_bytes, self._written_bytes = moved

    @property
    def nbytes(self) -> int:
        """Host memory of all buffers."""
        return NUM_ACTIVATION_STAGING * self._buffer_bytes

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes read from the drives and written to them so far."""
        return self._read_bytes, self._written_bytes

    def take(self, sizes: Sequence[int]) -> tuple[Staged, list[int | None]]:
        """Find a buffer, and room on the drives, for parts of these sizes.

        Returns:
            Where they go, and for every part its byte offset in the buffer.

        Raises:
            CapacityError: RAM has no room for the buffers, or a drive none for the bytes.
        """
        nbytes = pools.saved_buffer(pools.saved_visit(sizes))
        self._grow(nbytes)
        buffer = self._take_buffer()
        try:
            place = self._scratch.take(nbytes)
        except BaseException:
            self._free.appendleft(buffer)
            raise
        if not self._free_indices:
            self._free_indices.append(self._num_indices)
            self._num_indices += 1
        return Staged(self._free_indices.pop(), place, buffer), offsets_of(sizes, nbytes)

    def stow(self, staged: Staged, label: str) -> None:
        """Write what a visit has in its buffer to the drives; the buffer is free for the next one."""
        if staged.buffer is None or staged.is_stowed:
            return
        place, flat = staged.place, staged.buffer.flat[: staged.place.num_bytes]
        self._lanes.enqueue(
            Lane.STOW,
            functools.partial(self._scratch.write, place, flat),
            reads=[("offloaded", staged.buffer.index)],
            writes=staged.chunks,
            work=place.num_bytes,
            label=f"stow {label}",
        )
        self._written_bytes += place.num_bytes
        staged.is_stowed = True
        self.release(staged)

    def recall(self, staged: Staged, label: str, *, waits: bool = False) -> None:
        """Read a visit back into a buffer, if one is free.

        Args:
            staged: The visit.
            label: The label of what the visit has saved, for the record and for messages.
            waits: A claim that the visit is needed now: a buffer is found in any case, if need be that of
                what was read ahead for later, which will be read once more.
        """
        if staged.buffer is not None or not (self._free or waits):
            return
        assert staged.is_stowed, f"what was saved of {label} is neither in RAM nor on the drives"
        staged.buffer = self._take_buffer()
        self._recalled.append(staged)
        place, flat = staged.place, staged.buffer.flat[: staged.place.num_bytes]
        self._lanes.enqueue(
            Lane.RECALL,
            functools.partial(self._scratch.read, place, flat, f"what was saved of {label}"),
            reads=staged.chunks,
            writes=[("offloaded", staged.buffer.index)],
            work=place.num_bytes,
            label=f"recall {label}",
        )
        self._read_bytes += place.num_bytes

    def release(self, staged: Staged) -> None:
        """Make a visit's buffer free; who takes it next waits, by its name, for who has used it."""
        buffer, staged.buffer = staged.buffer, None
        if staged in self._recalled:
            self._recalled.remove(staged)
        if buffer is not None:
            self._free.append(buffer)

    def give_back(self, staged: Staged) -> None:
        """Make all that a visit has free."""
        self.release(staged)
        self._scratch.give_back(staged.place)
        self._free_indices.append(staged.index)

    def trim(self) -> None:
        """Give the host memory back, and the room on the drives; no visit has any of it."""
        assert not self._recalled
        while self._free:
            self._free.popleft().unmake(self._lanes)
        self._buffer_bytes = 0
        self._scratch.close()

    def _take_buffer(self) -> HostBuffer:
        if not self._free:
            self.release(self._recalled[-1])
        buffer = self._free.popleft()
        if buffer.flat.numel() < self._buffer_bytes:  # it was in use when the others grew
            buffer.unmake(self._lanes)
            buffer = HostBuffer.make(self._lanes, buffer.index, self._buffer_bytes)
        return buffer

    def _grow(self, nbytes: int) -> None:
        """Make every buffer hold so many bytes, at the first visit and where sequences become longer."""
        if nbytes <= self._buffer_bytes:
            return
        need = NUM_ACTIVATION_STAGING * nbytes
        if self._limit is not None and need > self._limit:
            raise CapacityError(
                f"host memory: saved activations pass {NUM_ACTIVATION_STAGING} buffers on their way to the "
                f"drives, {need / GIB:.3f} GiB, but {self._limit / GIB:.3f} GiB are left for them; use "
                "memory.boundaries=device, or a smaller train.micro_batch_size"
            )
        is_first, self._buffer_bytes = not self._buffer_bytes, nbytes
        indices = range(NUM_ACTIVATION_STAGING) if is_first else [buffer.index for buffer in self._free]
        while self._free:
            self._free.popleft().unmake(self._lanes)
        self._free.extend(HostBuffer.make(self._lanes, index, nbytes) for index in indices)
