"""Several ranks share out the state: they exchange sums of gradients, and spread what each has updated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.buffers import Buffer, gradients_buffer
from megatrain.plan.program.features.roles import BlockPass, SumTaken
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Prices, Task, Touched, Work
from megatrain.plan.program.visits import Visit


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundEnd(Operation):
    """Marks where a round's backward is over, in a program that is not exchanged yet."""

    visit: Visit


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeSums(Operation):
    """Send each rank its share of a complete sum, and add up what all ranks have sent of one's own."""

    gradient_buffer: int = -1
    """One with this rank's sum; -1: the block's own."""
    completes: bool = True
    """The gradient is complete after this round."""
    sums: range = range(0)
    """The places in the stack of partial sums that join what it makes, which takes the place of the first."""

    label, lane, moves, rate = "exchange", Lane.EXCHANGE, "exchanged_bytes", "exchange_s"
    ends_round = meets = True

    def touches(self) -> Touched:
        """Say that it reads this rank's sum, and writes its share of all ranks' sum in that place."""
        buffer = gradients_buffer(self.block, self.gradient_buffer)
        return (buffer,), (buffer, ("exchange", 0))

    def tasks(self, prices: Prices) -> tuple[Task, ...]:
        """Return it as one task, or as two copies."""
        return _tasks(self, prices, prices.exchanged_near(self.nbytes))

    def work(self, parts: Parts) -> Work:
        """Return the exchange."""
        return parts.gradients.exchange(self)

    def settle(self, parts: Parts) -> None:
        """Note that the round's sum is on its way."""
        parts.gradients.run_sums.summed.add(self.block)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread(Operation):
    """Wait until every rank has updated its share of a block, and bring one node's shares to the others."""

    drive_staging: int = -1
    """Host buffer through which state on drives passes; -1: the state is in RAM."""

    label, lane, moves, rate = "spread", Lane.SPREAD, "spread_bytes", "network_s"
    joins_update = meets = True

    def touches(self) -> Touched:
        """Say that it reads this rank's share and writes the whole."""
        through = (("drive_staging", self.drive_staging),) if self.drive_staging >= 0 else ()
        return (("share", self.block),), (("working", self.block), ("moments", self.block), *through)

    def through(self, buffer: int, nbytes: int | None = None) -> Operation:
        """Return the same of state on drives."""
        return replace(self, drive_staging=buffer)

    def work(self, parts: Parts) -> Work:
        """Return the wait and the copies."""
        return parts.weights.spread(self.block, self.drive_staging)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadOnDevice(Operation):
    """Bring what each rank has updated of a resident block to all others."""

    label, lane, moves, rate = "spread", Lane.GATHER, "spread_bytes", "give_s"
    meets = True

    def touches(self) -> Touched:
        """Say that it reads this rank's share of the weights and writes the whole."""
        place = (("resident", self.block),)
        return place, place

    def tasks(self, prices: Prices) -> tuple[Task, ...]:
        """Return it as one task, or as two copies."""
        return _tasks(self, prices, prices.given_near(self.nbytes))

    def work(self, parts: Parts) -> Work:
        """Return the gather."""
        return parts.weights.gather_shares(self.block)


def _tasks(operation: Operation, prices: Prices, near: float) -> tuple[Task, ...]:
    """Return one task, or two copies of what stays in the node: to its memory, and from there."""
    if not prices.passes_host:
        return (operation.task(operation.lane, prices),)
    there: tuple[Buffer, ...] = (("exchange", 0),)
    (reads, writes), label = operation.touches(), operation.label
    up_s = prices.up_s(near) + operation.seconds(prices)
    return (
        Task(Lane.EXCHANGE, prices.down_s(near), reads, there, label),
        Task(Lane.GATHER, up_s, there, writes, label),
    )


def spread(update: Operation, nbytes: int, *, has_shares: bool, on_device: bool = False) -> list[Operation]:
    """List an update, and, of a rank's share, what brings those of the other ranks.

    Args:
        update: The update of a block, or the copy home of one.
        nbytes: The bytes of new weights that this rank sends.
        has_shares: Whether several ranks update a share each.
        on_device: Whether the block is updated on the device.
    """
    if not has_shares:
        return [update]
    kind = SpreadOnDevice if on_device else Spread
    return [update, kind(block=update.block, nbytes=nbytes)]


def exchanged(
    operations: Sequence[Operation], sizes: Sequence[BlockSize], outer: Collection[int]
) -> list[Operation]:
    """List operations in which ranks exchange sums as soon as these are complete.

    Args:
        operations: The program, with marks of where rounds end.
        sizes: The blocks' sizes.
        outer: The blocks in no layer that stay on the device: ranks exchange their sums when a round ends.
    """
    result: list[Operation] = []
    visit: Visit | None = None

    def exchange(block: int, gradient_buffer: int = -1) -> Operation:
        assert visit is not None
        return ExchangeSums(
            block=block,
            gradient_buffer=gradient_buffer,
            completes=visit.completes,
            sums=visit.sums.loaded if visit.sums.are_shares else range(0),
            nbytes=sizes[block].exchange_bytes,
        )

    for operation in operations:
        if isinstance(operation, RoundEnd):
            visit = operation.visit
            result += [exchange(block) for block in outer if sizes[block].is_trained]
            continue
        if isinstance(operation, SumTaken) and visit is not None and visit.sums.exchanges:
            result.append(exchange(operation.block, operation.gradient_buffer))
        result.append(operation)
        if isinstance(operation, BlockPass):
            visit, block = operation.visit, operation.block
            is_last = visit.is_backward and visit.is_last and visit.sums.exchanges
            if is_last and sizes[block].is_trained and sizes[block].updates_on_device and block not in outer:
                result.append(exchange(block))
    return result
