"""Gradients wait for the norm on the device or on drives, and sums on drives for the next round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.buffers import gradients_buffer, home_buffer, waiting_buffer
from megatrain.plan.program.features.gradients import load_of_waiting
from megatrain.plan.program.features.roles import GradientEnd, SumTaken
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Prices, Touched, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold(SumTaken):
    """Put a gradient into device memory of the block's own, where it waits, and sum its squares."""

    waiting: int = -1
    """The number of that memory; -1: the place where a resident block's gradient adds up."""

    label = "hold"

    def touches(self) -> Touched:
        """Say that it reads the gradient buffer, and writes where the gradient waits and its squares."""
        buffer = gradients_buffer(self.block, self.gradient_buffer)
        return (buffer,), (waiting_buffer(self.block, self.waiting), ("squares", self.block))

    def seconds(self, prices: Prices) -> float:
        """Return the seconds in which the device's memory is passed."""
        return prices.hold_s(self.block)

    def work(self, parts: Parts) -> Work:
        """Return the rounding."""
        return partial(parts.gradients.hold, self.block, self.gradient_buffer, is_single=self.is_single)

    def settle(self, parts: Parts) -> None:
        """Note that the gradient waits."""
        parts.gradients.settle_held(self.block, self.gradient_buffer, completes=self.completes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeHome(Operation):
    """Copy a gradient that has waited on the device to a staging buffer, ahead of its update."""

    waiting: int
    staging: int

    label, lane, moves, rate = "offload", Lane.OFFLOAD, "offload_bytes", "down_s"

    def touches(self) -> Touched:
        """Say that it reads where the gradient waits and writes the staging buffer."""
        waiting = waiting_buffer(self.block, self.waiting)
        return (waiting,), (home_buffer(self.block, self.staging),)

    def work(self, parts: Parts) -> Work:
        """Return the copy."""
        return partial(parts.gradients.take_home, self.block, self.staging, waits=self.waiting >= 0)

    def settle(self, parts: Parts) -> None:
        """Count the copy."""
        parts.counts.offloads += self.waiting >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Park(GradientEnd):
    """Write a gradient, or a sum, that has come to a staging buffer on to the drives."""

    staging: int

    label, lane, moves, rate = "park", Lane.STOW, "drive_write_bytes", "write_s"

    def touches(self) -> Touched:
        """Say that it reads the staging buffer and writes the room on the drives."""
        return (home_buffer(self.block, self.staging),), (("parked", self.block),)

    def work(self, parts: Parts) -> Work:
        """Return the write."""
        return parts.gradients.park(self.block, self.staging, completes=self.completes)

    def settle(self, parts: Parts) -> None:
        """Note where the gradient is."""
        parts.gradients.settle_parked(self.block, completes=self.completes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpark(Operation):
    """Read a gradient back, ahead of its update, or a sum, ahead of its load."""

    staging: int
    completes: bool = True
    """It is a complete gradient."""

    label, lane, moves, rate = "unpark", Lane.RECALL, "drive_read_bytes", "read_s"

    def touches(self) -> Touched:
        """Say that it reads the room on the drives and writes the staging buffer."""
        return (("parked", self.block),), (home_buffer(self.block, self.staging),)

    def begin(self, parts: Parts) -> tuple[Operation, ...]:
        """Return it if it is there: a sum may have been taken for a complete gradient."""
        return (self,) if parts.gradients.is_parked(self.block, completes=self.completes) else ()

    def work(self, parts: Parts) -> Work:
        """Return the read."""
        return parts.gradients.unpark(self.block, self.staging, completes=self.completes)


def held(operations: Sequence[Operation], waits: Callable[[int, bool], bool]) -> list[Operation]:
    """List operations in which gradients wait on the device.

    Args:
        operations: The program, where they are taken home.
        waits: A function that returns whether a block's gradient waits there, complete or not.
    """

    def place(operation: Operation) -> Operation:
        block = operation.block
        if isinstance(operation, SumTaken) and waits(block, operation.completes):
            return Hold(
                block=block,
                gradient_buffer=operation.gradient_buffer,
                completes=operation.completes,
                adds=operation.adds,
                waiting=block,
            )
        if operation.loads_sum and waits(block, False):
            return load_of_waiting(operation)
        return operation

    return [place(operation) for operation in operations]


def hold_resident(block: int) -> Operation:
    """Return what completes the gradient of a resident block where it adds up, which is where it waits."""
    return Hold(block=block)


def take_home(block: int, size: BlockSize, staging: int) -> Operation:
    """Return the copy of a gradient that waits to a staging buffer."""
    waiting = block if size.is_streamed else -1
    return TakeHome(block=block, waiting=waiting, staging=staging, nbytes=size.offload_bytes)


def parked(
    operations: Sequence[Operation], sizes: Sequence[BlockSize], waits: Callable[[int, bool], bool]
) -> list[Operation]:
    """List operations in which gradients wait on drives, through staging buffers that are used in turn.

    Args:
        operations: The program, where they are taken home and loaded from there.
        sizes: The blocks' sizes.
        waits: A function that returns whether a block's gradient waits there, complete or not.
    """
    result: list[Operation] = []
    staging = -1
    for operation in operations:
        block = operation.block
        if isinstance(operation, SumTaken) and waits(block, operation.completes):
            staging = (staging + 1) % NUM_GRADIENT_STAGING
            result += to_drives(operation, sizes[block], staging)
        elif operation.loads_sum and waits(block, False):
            staging = (staging + 1) % NUM_GRADIENT_STAGING
            read = unparked(block, sizes[block], staging, completes=False)
            result += [read, operation.through(staging)]
        else:
            result.append(operation)
    return result


def to_drives(offload: SumTaken, size: BlockSize, staging: int) -> list[Operation]:
    """List the two copies of a gradient, or a sum, to the drives: to a staging buffer, and on from there."""
    nbytes = size.offload_bytes if offload.completes else size.accumulator_bytes
    write = park(offload.block, size, staging, completes=offload.completes)
    return [offload.through(staging, nbytes), write]


def park(block: int, size: BlockSize, staging: int, *, completes: bool = True) -> Operation:
    """Return the write of a gradient, or of a sum, in a staging buffer to the drives."""
    nbytes = size.parked_bytes if completes else size.parked_sum_bytes
    return Park(block=block, staging=staging, completes=completes, nbytes=nbytes)


def unparked(block: int, size: BlockSize, staging: int, *, completes: bool = True) -> Operation:
    """Return the read of a gradient, or of a sum, from the drives into a staging buffer."""
    nbytes = size.parked_bytes if completes else size.parked_sum_bytes
    return Unpark(block=block, staging=staging, completes=completes, nbytes=nbytes)
