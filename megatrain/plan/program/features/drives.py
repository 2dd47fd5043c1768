"""State on drives: read ahead of its update and written behind it; commits, which are what a crash leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatrain.layout.host_buffers import NUM_STATE_STAGING, pieces_of
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Touched, Work
from megatrain.plan.program.read_ahead import read_ahead
from megatrain.plan.program.spec import StepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Read(Operation):
    """Read a block's state from the drives, ahead of its update; several ranks read a part each."""

    drive_staging: int

    label, lane, moves, rate = "read", Lane.READ, "drive_read_bytes", "read_s"

    def touches(self) -> Touched:
        """Say that it reads the block's image and writes a host buffer."""
        return (("drive", self.block),), (("drive_staging", self.drive_staging),)

    def work(self, parts: Parts) -> Work:
        """Return the read."""
        return parts.drives.read(self.block, self.drive_staging)


@dataclass(frozen=True, kw_only=True, slots=True)
class Write(Operation):
    """Write a block's state back to the drives; several ranks write a part each."""

    drive_staging: int

    label, lane, moves, rate = "write", Lane.WRITE, "drive_write_bytes", "write_s"
    changes = "change"

    def touches(self) -> Touched:
        """Say that it reads the host buffer and writes the block's image."""
        return (("drive_staging", self.drive_staging),), (("drive", self.block),)

    def work(self, parts: Parts) -> Work:
        """Return the write."""
        return parts.drives.write(self.block, self.drive_staging)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spill(Operation):
    """Copy a piece of a block's state in RAM to where the drives take it from."""

    drive_staging: int
    piece: int
    """The number of the piece in the block's image."""

    label, lane, rate = "spill", Lane.HOST, "spill_s"

    def touches(self) -> Touched:
        """Say that it reads the state in RAM and writes a host buffer."""
        state = ("working", self.block), ("moments", self.block)
        return state, (("drive_staging", self.drive_staging),)

    def work(self, parts: Parts) -> Work:
        """Return the copy."""
        return parts.drives.spill(self.block, self.drive_staging, self.piece)


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePiece(Spill):
    """Write a spilled piece: a copy of what RAM has, which is not read before another run goes on from it."""

    label, lane, moves, rate = "write", Lane.WRITE, "drive_write_bytes", "write_s"

    def touches(self) -> Touched:
        """Say that it reads the host buffer and writes its place in the block's image."""
        return (("drive_staging", self.drive_staging),), (("spilled", self.block),)

    def work(self, parts: Parts) -> Work:
        """Return the write."""
        return parts.drives.write_piece(self.block, self.drive_staging, self.piece)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seal(Operation):
    """Take down what a commit says of the run, once all updates are done, and all ranks' spills."""

    label, lane = "seal", Lane.HOST

    def touches(self) -> Touched:
        """Say that it writes what the commit says of the run."""
        return (), (("meta", 0),)

    def work(self, parts: Parts) -> Work:
        """Return what takes it down."""
        return parts.drives.seal()


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit(Operation):
    """Make what was written last what a crash leaves. The first of several ranks does it."""

    blocks: tuple[int, ...]
    """The blocks on the drives."""

    label, lane = "commit", Lane.WRITE

    def touches(self) -> Touched:
        """Say that it reads all that was written."""
        return (("meta", 0), *((image, n) for image in ("drive", "spilled") for n in self.blocks)), ()

    def work(self, parts: Parts) -> Work:
        """Return the commit."""
        return parts.drives.make_commit()


def with_state_through(
    operations: Sequence[Operation],
    on_drives: Collection[int],
    sizes: Sequence[int] | Mapping[int, int],
    num_buffers: int,
) -> list[Operation]:
    """Read the state of blocks on drives before their updates, and write it after: all ranks' updates.

    Args:
        operations: The program, with the updates in order.
        on_drives: The blocks whose remainder and moments are there.
        sizes: The bytes that cross each way, by block.
        num_buffers: The number of host buffers, used in turn.
    """

    def is_ours(operation: Operation) -> bool:
        return operation.is_update and operation.block in on_drives

    def surround(operation: Operation, buffer: int) -> tuple[Operation, list[Operation]]:
        block, nbytes = operation.block, sizes[operation.block]
        after = [operation, *(spreads[block] for _ in range(block in spreads))]
        write = Write(block=block, drive_staging=buffer, nbytes=nbytes)
        read = Read(block=block, drive_staging=buffer, nbytes=nbytes)
        return read, [*(one.through(buffer) for one in after), write]

    def joins(operation: Operation) -> bool:
        return operation.joins_update and operation.block in on_drives

    spreads = {operation.block: operation for operation in operations if joins(operation)}
    others = [operation for operation in operations if not joins(operation)]
    return read_ahead(others, is_ours, surround, num_buffers)


def commit_program(
    spec: StepSpec, changed: Iterable[tuple[int, bool]], *, in_pieces: bool = True, every: int = 1
) -> list[Operation]:
    """List a commit: what lives in RAM is written through the buffers of state, then all is sealed.

    Args:
        spec: The specification of the step, with state on drives.
        changed: The parts of what lives in RAM that differ from their images: a block, and whether it is the
            working weights.
        in_pieces: Whether parts are listed piece by piece. False: each part of a block at once, which takes
            the same time and is a shorter list.
        every: The number of steps that share the commit: as one of them is planned, it moves its part.
    """
    drives = spec.drives
    assert drives is not None
    operations: list[Operation] = []
    turn = 0
    for block, is_working in changed:
        nbytes = drives.working_bytes[block] if is_working else drives.state_bytes[block]
        first = len(pieces_of(drives.state_bytes[block])) if is_working and in_pieces else 0
        start = 0
        for number, size in enumerate(pieces_of(nbytes) if in_pieces else [nbytes] * (nbytes > 0)):
            own = drives.piece_bytes(block, size, start) // every
            for kind in (Spill, WritePiece):
                operations.append(kind(block=block, drive_staging=turn, piece=first + number, nbytes=own))
            turn = (turn + 1) % NUM_STATE_STAGING
            start += size
    blocks = tuple(range(len(spec.sizes)))
    return [*operations, Seal(), Commit(blocks=blocks)]


def changed_by_step(spec: StepSpec) -> list[tuple[int, bool]]:
    """List what a step changes of the state in RAM, as `commit_program` takes it."""
    drives = spec.drives
    assert drives is not None
    return [
        (block, is_working)
        for block, size in enumerate(spec.sizes)
        for is_working, there in ((False, drives.state), (True, drives.working))
        if size.is_trained and block not in there
    ]
