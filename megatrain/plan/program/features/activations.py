"""Saved activations wait on the host or on drives: out after a forward, back one visit before their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, ClassVar

from megatrain.layout import pools
from megatrain.layout.host_buffers import NUM_ACTIVATION_STAGING
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Touched
from megatrain.plan.program.visits import Visit


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfVisit(Operation):
    """A copy of what one visit has saved."""

    micro_batch: int = 0
    num_micro_batches: int = 1
    """The number that pass in this operation: more than one where a plan times them together."""
    saved: int = -1
    """The number, unique in the program, of what the visit has saved."""
    activation_staging: int = -1
    """Host buffer through which what waits on drives passes; -1: it waits in RAM."""

    way: ClassVar[str]
    """The method of the engine's activations that moves it."""

    @property
    def _at_home(self) -> Buffer:
        """Name the host buffer with what the visit has saved."""
        if self.activation_staging >= 0:
            return ("activation_staging", self.activation_staging)
        return ("activations", self.saved)

    def through(self, buffer: int, nbytes: int | None = None) -> Operation:
        """Return the same of what waits on drives."""
        return replace(self, activation_staging=buffer)

    def begin(self, parts: Parts) -> tuple[Operation, ...]:
        """Let the engine's activations do it: they know what the newest of these visits has saved."""
        self.move(parts.activations, parts.activations.key_of(self.block, self.micro_batch))
        return ()

    def move(self, activations: Any, key: int) -> None:
        """Move what the visit of a key has saved."""
        getattr(activations, self.way)(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Save(_OfVisit):
    """Copy a visit's saved activations to the host."""

    label, lane, moves, rate = "save", Lane.SAVE, "saved_bytes", "down_s"
    way = "flush"

    def touches(self) -> Touched:
        """Say that it reads what leaves the device and writes where that waits, or passes."""
        return (("leaving", self.saved % 2),), (self._at_home,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stow(_OfVisit):
    """Write what has been copied to the host on to the drives."""

    label, lane, moves, rate = "stow", Lane.STOW, "drive_write_bytes", "write_s"

    def touches(self) -> Touched:
        """Say that it reads the host buffer and writes the room on the drives."""
        return (self._at_home,), (("scratch", self.saved),)

    def move(self, activations: Any, key: int) -> None:
        """Enqueue the write."""
        activations.stow(key, f"block {self.block} in micro-batch {self.micro_batch} of its round")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall(_OfVisit):
    """Read a visit's saved activations back from the drives, ahead of their copy to the device."""

    label, lane, moves, rate = "recall", Lane.RECALL, "drive_read_bytes", "read_s"
    way = "recall"

    def touches(self) -> Touched:
        """Say that it reads the room on the drives and writes the host buffer."""
        return (("scratch", self.saved),), (self._at_home,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore(_OfVisit):
    """Copy a visit's saved activations back to the device, one visit before they are needed."""

    arrival: int = -1
    """One of two places on the device."""

    label, lane, moves, rate = "restore", Lane.RESTORE, "restored_bytes", "up_s"
    way = "prefetch"

    def touches(self) -> Touched:
        """Say that it reads where they wait, or pass, and writes where they arrive."""
        return (self._at_home,), (("arriving", self.arrival),)


class Saving:
    """The copies of saved activations between the visits of a program."""

    def __init__(self, visits: Sequence[Visit], nbytes: Mapping[int, int]) -> None:
        """Place the copies of these visits; `nbytes`: by block, what a micro-batch saves, if it is known."""
        self._visits = visits
        self._nbytes = nbytes
        self._restores = deque(n for n, visit in enumerate(visits) if visit.restores >= 0)
        self._restored = -1
        self._numbers: dict[tuple[int, int], int] = {}
        """By block and micro-batch: the number of what it has saved and not restored yet."""
        self._num_saved = 0
        self._arrivals: dict[int, int] = {}
        """By position of a visit: where on the device its activations arrive."""

    def next_number(self, visit: Visit) -> int:
        """Return the number of what a forward saves."""
        number = self._numbers[visit.block, visit.micro_batch] = self._num_saved
        self._num_saved += 1
        return number

    def copy_after(self, visit: Visit, number: int) -> Operation:
        """Return the copy of what a forward has saved, by its number."""
        count = visit.num_micro_batches
        nbytes = self._nbytes.get(visit.block, 0) * count
        both: dict[str, Any] = {"block": visit.block, "micro_batch": visit.micro_batch}
        return Save(num_micro_batches=count, saved=number, nbytes=nbytes, **both)

    def restores_before(self, position: int) -> list[Operation]:
        """List the copies back to begin before the visit at `position`: its own, and the next one."""
        made: list[Operation] = []
        while self._restores and (self._restores[0] <= position or self._restored <= position):
            visit = self._visits[self._restores[0]]
            number = self._numbers.pop((visit.restores, visit.micro_batch), -1)
            if number < 0:  # of a later round, whose forward comes first
                break
            self._restored = self._restores.popleft()
            count = visit.num_micro_batches
            if number == self._num_saved - 1:
                count -= 1  # the newest is still on the device: its memory is freed when the next one leaves
            if not count:
                continue
            self._arrivals[self._restored] = len(self._arrivals) % 2
            made.append(
                Restore(
                    block=visit.restores,
                    micro_batch=visit.micro_batch,
                    num_micro_batches=visit.num_micro_batches,
                    saved=number,
                    arrival=self._arrivals[self._restored],
                    nbytes=self._nbytes.get(visit.restores, 0) * count,
                )
            )
        return made

    def arrival_of(self, position: int) -> int:
        """Return where what a visit needs has arrived; -1: nothing has."""
        return self._arrivals.get(position, -1)


def with_activations_through(
    operations: Sequence[Operation], rooms: Mapping[int, int], num_buffers: int = NUM_ACTIVATION_STAGING
) -> list[Operation]:
    """Write what is saved on to the drives, and read it back ahead of its copy to the device.

    One buffer is for what is being restored; as many visits as there are others are read ahead, from the
    first backward on, and none before it was written.

    Args:
        operations: The program, with copies to the host and back, in order.
        rooms: The room on the host of what a micro-batch saves, by block.
        num_buffers: The number of host buffers through which it passes.
    """
    upcoming = deque(operation for operation in operations if isinstance(operation, Restore))
    stowed: dict[tuple[int, int], Save] = {}
    """What the drives hold, by block and micro-batch: the operation that has saved it."""
    recalled: dict[tuple[int, int], int] = {}
    """The buffer in which it is again."""
    free = deque(range(num_buffers))
    result: list[Operation] = []

    def recall(restore: Restore) -> None:
        visit = restore.block, restore.micro_batch
        saved = stowed.pop(visit)
        recalled[visit] = free.popleft()
        count = restore.nbytes * saved.num_micro_batches // saved.nbytes if saved.nbytes else 0
        nbytes = count * pools.saved_buffer(rooms[saved.block])
        result.append(_other(Recall, saved, activation_staging=recalled[visit], nbytes=nbytes))

    def read_ahead() -> None:
        for restore in list(islice(upcoming, len(recalled), num_buffers - 1)):
            if (restore.block, restore.micro_batch) not in stowed:
                return
            recall(restore)

    for operation in operations:
        if operation.is_backward:
            read_ahead()
        if isinstance(operation, Save):
            visit = operation.block, operation.micro_batch
            stowed[visit] = replace(operation, activation_staging=free[0])
            nbytes = operation.num_micro_batches * pools.saved_buffer(rooms[operation.block])
            result += [stowed[visit], _other(Stow, stowed[visit], nbytes=nbytes)]
            free.rotate(-1)
        elif isinstance(operation, Restore):
            visit = operation.block, operation.micro_batch
            if visit in stowed:
                recall(operation)
            upcoming.popleft()
            free.append(recalled.pop(visit))
            result.append(operation.through(free[-1]))
            read_ahead()
        else:
            result.append(operation)
    return result


def _other(kind: type[Stow | Recall], saved: Save, **changes: Any) -> Operation:
    """Return another copy of what has been saved."""
    same = {field.name: getattr(saved, field.name) for field in fields(saved)}
    return kind(**{**same, **changes})
