"""Gradients go home, or their sums do and come back; on the host, they add up, and sums are completed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.buffers import gradients_buffer, home_buffer
from megatrain.plan.program.features.roles import BlockPass, GradientEnd, SumTaken
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Prices, Touched, Work
from megatrain.plan.program.visits import Visit


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(Operation):
    """Copy what earlier rounds added up to the device, to go on adding."""

    gradient_buffer: int = -1
    staging: int = -1
    """Host buffer through which it has come from drives; -1: it is in a plane."""
    waiting: int = -1
    """Place on the device where it waits; -1: it is on the host."""
    completes: bool = True
    """The gradient is complete after the round."""
    sums: range = range(1)
    """The partial sums that it copies, by their places in the stack; see `Runs`."""
    is_share: bool = False
    """They are a rank's shares."""

    label, lane, moves = "load", Lane.FETCH, "fetch_bytes"
    loads_sum = True
    adds = True

    def touches(self) -> Touched:
        """Say that it reads where the sum waits and writes the gradient buffer."""
        home = ("waiting", self.waiting) if self.waiting >= 0 else home_buffer(self.block, self.staging)
        return (home,), (gradients_buffer(self.block, self.gradient_buffer),)

    def seconds(self, prices: Prices) -> float:
        """Return the seconds of the copy, of sums as the kernels keep them."""
        kept = prices.kept_bytes(self.block, len(self.sums), is_share=self.is_share)
        return prices.up_s(min(self.nbytes, kept))

    def through(self, buffer: int, nbytes: int | None = None) -> Operation:
        """Return the same from a staging buffer."""
        return replace(self, staging=buffer, nbytes=self.nbytes if nbytes is None else nbytes)

    def begin(self, parts: Parts) -> tuple[Operation, ...]:
        """Return the copy from where the gradient is: it may have been taken for complete, and waits.

        Nothing, if the step's backwards so far have brought none: what is there is of an earlier step.
        """
        gradients, block = parts.gradients, self.block
        if not gradients.has(block):
            return ()
        if gradients.waits(block):
            return (load_of_waiting(self),)
        if gradients.is_in_plane(block):
            return (replace(self, staging=-1),)
        if gradients.is_parked(block, completes=True) and (self.staging < 0 or gradients.splits):
            staging = max(self.staging, 0)
            read, nbytes = gradients.unparked(block, staging)
            return read, self.through(staging, nbytes)
        return (self,)

    def work(self, parts: Parts) -> Work:
        """Return the copy."""
        return parts.gradients.load(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(SumTaken):
    """Copy a gradient to the host, and sum its squares on the way if it is complete."""

    sums: range = range(1)
    """The partial sums that it copies, of a sum that goes on adding up."""
    is_share: bool = False
    """They are a rank's shares: an exchange has made them."""

    label, moves = "offload", "offload_bytes"

    def touches(self) -> Touched:
        """Say that it reads the gradient buffer and writes its home, and the squares of what is complete."""
        home, squares = home_buffer(self.block, self.staging), ("squares", self.block)
        buffer = gradients_buffer(self.block, self.gradient_buffer)
        return (buffer,), (home, squares) if self.completes else (home,)

    def seconds(self, prices: Prices) -> float:
        """Return the seconds of the copy, of sums as the kernels keep them."""
        if self.completes:
            return prices.down_s(self.nbytes)
        kept = prices.kept_bytes(self.block, len(self.sums), is_share=self.is_share)
        return prices.down_s(min(self.nbytes, kept))

    def through(self, buffer: int, nbytes: int | None = None) -> Operation:
        """Return the same to a staging buffer."""
        return replace(self, staging=buffer, nbytes=self.nbytes if nbytes is None else nbytes)

    def work(self, parts: Parts) -> Work:
        """Return the copy."""
        return partial(parts.gradients.offload, self)

    def settle(self, parts: Parts) -> None:
        """Note where it puts the gradient."""
        parts.gradients.settle_offload(self)
        parts.counts.offloads += self.gradient_buffer >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Round(Operation):
    """Round a complete sum on the host to the working dtype, and sum its squares."""

    staging: int = -1
    """Host buffer through which the sum has come from drives; -1: it is in its plane."""

    label, lane, rate = "round", Lane.HOST, "host_pass_s"

    def touches(self) -> Touched:
        """Say that it reads the sum and writes the gradient plane, the squares, and a staged sum's buffer."""
        home, plane = home_buffer(self.block, self.staging), ("gradient", self.block)
        return (home,), (plane, ("squares", self.block), *((home,) if self.staging >= 0 else ()))

    def work(self, parts: Parts) -> Work:
        """Return the rounding."""
        return partial(parts.gradients.complete_on_host, self.block, self.staging)

    def settle(self, parts: Parts) -> None:
        """Note where the complete gradient is."""
        parts.gradients.settle_on_host(self.block, self.staging)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliver(SumTaken):
    """Copy the gradient of one micro-batch to a staging buffer, from which the host adds it to a sum."""

    label, moves, rate = "offload", "offload_bytes", "down_s"

    def touches(self) -> Touched:
        """Say that it reads the gradient buffer and writes the staging buffer."""
        buffer = gradients_buffer(self.block, self.gradient_buffer)
        return (buffer,), (home_buffer(self.block, self.staging),)

    def work(self, parts: Parts) -> Work:
        """Return the copy."""
        return partial(parts.gradients.deliver, self.block, self.gradient_buffer, self.staging)

    def settle(self, parts: Parts) -> None:
        """Note that the gradient buffer is free."""
        parts.gradients.empty(self.gradient_buffer)
        parts.counts.offloads += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Add(GradientEnd):
    """Add a gradient to its block's sum; the last one is rounded to the working dtype, its squares summed."""

    staging: int

    label, lane, rate = "add", Lane.HOST, "add_s"
    adds = is_sum = True

    def touches(self) -> Touched:
        """Say that it reads the staging buffer and writes the sum, and the squares of a complete one."""
        plane = ("gradient", self.block)
        writes = (plane, ("squares", self.block)) if self.completes else (plane,)
        return (home_buffer(self.block, self.staging),), writes

    def work(self, parts: Parts) -> Work:
        """Return the addition."""
        return parts.gradients.add(self.block, self.staging, completes=self.completes)

    def settle(self, parts: Parts) -> None:
        """Note where the gradient is."""
        parts.gradients.settle_sum(self.block, completes=self.completes)


def leaving(visit: Visit, gradient_buffer: int, size: BlockSize) -> Operation:
    """Return the copy home of what a block's last backward of a round leaves in its gradient buffer.

    Args:
        visit: The block's last backward of the round.
        gradient_buffer: The number of the buffer.
        size: The size of the block.
    """
    left = visit.sums.left
    return Offload(
        block=visit.block,
        gradient_buffer=gradient_buffer,
        completes=visit.completes,
        adds=visit.adds_up,
        sums=left,
        is_share=visit.sums.exchanges,
        nbytes=size.offload_bytes if visit.completes else len(left) * size.sum_bytes(visit.sums),
    )


def coming(visit: Visit, gradient_buffer: int, size: BlockSize) -> Operation:
    """Return the copy of what earlier rounds have added up to the gradient buffer; see `leaving`."""
    loaded = visit.sums.loaded
    return Load(
        block=visit.block,
        gradient_buffer=gradient_buffer,
        completes=visit.completes,
        sums=loaded,
        is_share=visit.sums.are_shares,
        nbytes=len(loaded) * size.sum_bytes(visit.sums),
    )


def load_of_waiting(operation: Operation) -> Operation:
    """Return a load of a gradient that waits on the device, in the block's own place."""
    assert isinstance(operation, Load)
    return replace(operation, waiting=operation.block, staging=-1, nbytes=0)


def offload_residents(
    sizes: Sequence[BlockSize], blocks: Sequence[int], *, staging: int = -1, has_shares: bool = False
) -> list[Operation]:
    """List the copies that take the gradients of resident `blocks` home, once per step."""
    return [
        Offload(
            block=block, adds=True, staging=staging, is_share=has_shares, nbytes=sizes[block].offload_bytes
        )
        for block in blocks
    ]


def home_of_sum(taken: SumTaken, nbytes: int, *, completes: bool) -> SumTaken:
    """Return the copy home of a sum whose round has not ended as foreseen.

    Args:
        taken: The operation that was foreseen to take the sum out of its buffer.
        nbytes: The bytes of the sum.
        completes: Whether it goes to a place of complete gradients, which in fp32 holds a sum like any other.
    """
    if isinstance(taken, Offload):
        return replace(taken, staging=-1, completes=completes, nbytes=nbytes)
    return Offload(
        block=taken.block,
        gradient_buffer=taken.gradient_buffer,
        adds=taken.adds,
        completes=completes,
        nbytes=nbytes,
    )


def rounded_sum(block: int, size: BlockSize, staging: int = -1) -> Operation:
    """Return the rounding of a sum at home, or in a staging buffer, to the working dtype."""
    # it is read in fp32, written, and read again in the working dtype
    return Round(block=block, staging=staging, nbytes=size.accumulator_bytes + 2 * size.offload_bytes)


def added(operations: Sequence[Operation], sizes: Sequence[BlockSize]) -> list[Operation]:
    """List operations in which gradients of visits with `sums_on_host` are added to the sum there.

    Args:
        operations: The program, where these gradients are taken home as others are.
        sizes: The blocks' sizes.
    """
    result: list[Operation] = []
    visit = None
    staging = -1
    for operation in operations:
        if isinstance(operation, BlockPass):
            visit = operation.visit
        if visit is None or not visit.sums_on_host or not isinstance(operation, SumTaken):
            result.append(operation)
            continue
        block, size, count = operation.block, sizes[operation.block], visit.num_micro_batches
        staging = (staging + 1) % NUM_GRADIENT_STAGING
        result.append(
            Deliver(
                block=block,
                gradient_buffer=operation.gradient_buffer,
                adds=True,
                completes=False,
                staging=staging,
                nbytes=count * size.offload_bytes,
            )
        )
        nbytes = (count - 1) * size.added_bytes
        nbytes += size.last_added_bytes if visit.completes else size.added_bytes
        result.append(Add(block=block, staging=staging, completes=visit.completes, nbytes=nbytes))
    return result
