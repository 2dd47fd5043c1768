"""From an operation to its seconds on a machine: the one place that says how long anything takes."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.plan.cost.collectives import Collectives
from megatrain.plan.cost.contention import Shares
from megatrain.plan.cost.layer_costs import LayerCosts
from megatrain.plan.cost.rates import Rates
from megatrain.plan.cost.timetable import Task
from megatrain.plan.memory.block_sums import share_of
from megatrain.plan.memory.planned_blocks import PlannedBlock
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Kind, Lane
from megatrain.plan.program.operations import Operation


class Pricing:
    """The seconds of every operation of a choice."""

    def __init__(
        self,
        rates: Rates,
        costs: LayerCosts,
        blocks: Sequence[PlannedBlock],
        shares: Shares,
        collectives: Collectives,
    ) -> None:
        """Price for a machine (`rates`), a model's layers under a choice (`costs`), and its blocks.

        `shares` is what is left of the rates where lanes are in each other's way, and `collectives` knows the
        ranks.
        """
        self._collectives = collectives
        self._rates = rates
        self._costs = costs
        self._blocks = blocks
        self._shares = shares
        self._visits_s: dict[tuple[Kind, int, bool], float] = {}
        """Of one micro-batch."""

    def tasks(self, operation: Operation) -> tuple[Task, ...]:
        """Return an operation as one task, or two where its buffers are used one after the other."""
        kind = operation.kind
        seconds = self.seconds(operation)
        reads, writes = operation.reads, operation.writes
        lane = operation.lane
        if kind is Kind.BACKWARD:
            # only what autograd has made needs the gradient buffer, not what makes it
            visit = Task(lane, seconds, reads, (), kind.value)
            return visit, Task(lane, 0.0, (), writes, "collect")
        if self._is_among_devices(operation) and self._collectives.passes_host:
            return self._through_host(operation)
        if kind is Kind.SYNC or (
            kind is Kind.UPDATE and operation.on_device and self._rates.updates_in_compute
        ):
            lane = Lane.COMPUTE  # a thread that waits launches nothing; an update there runs among the rest
        return (Task(lane, seconds, reads, writes, kind.value),)

    @staticmethod
    def _is_among_devices(operation: Operation) -> bool:
        """Whether an operation brings something from each device to all others."""
        return operation.kind is Kind.EXCHANGE or (operation.kind is Kind.SPREAD and operation.on_device)

    def _through_host(self, operation: Operation) -> tuple[Task, ...]:
        """Return an exchange as the two copies of what stays in the node: to its memory, and from there."""
        collectives, shares, kind = self._collectives, self._shares, operation.kind.value
        near_of = collectives.exchanged_near if operation.kind is Kind.EXCHANGE else collectives.given_near
        near = near_of(self._sum_bytes(operation))
        there: tuple[Buffer, ...] = (("exchange", 0),)
        up_s = self._rates.fetch_s(near) / shares.up + self.seconds(operation)
        return (
            Task(Lane.EXCHANGE, self._rates.offload_s(near) / shares.down, operation.reads, there, kind),
            Task(Lane.GATHER, up_s, there, operation.writes, kind),
        )

    def seconds(self, operation: Operation) -> float:
        """Return the seconds that an operation takes."""
        kind = operation.kind
        if kind is Kind.FORWARD or kind is Kind.BACKWARD:
            key = (kind, operation.block, operation.is_head)
            if key not in self._visits_s:
                self._visits_s[key] = self._visit_s(operation)
            return self._visits_s[key] * operation.num_micro_batches
        rates, nbytes, shares = self._rates, operation.nbytes, self._shares
        match kind:
            case Kind.FETCH | Kind.RESTORE:
                return rates.fetch_s(nbytes) / shares.up
            case Kind.GATHER:
                return self._collectives.gather_s(nbytes)
            case Kind.EXCHANGE:
                sent = self._sum_bytes(operation)
                return self._collectives.exchange_s(sent) + self._collectives.sum_s(sent)
            case Kind.SPREAD if operation.on_device:
                return self._collectives.give_s(nbytes)
            case Kind.SPREAD:
                return self._collectives.network_s(nbytes)
            case Kind.LOAD:
                return rates.fetch_s(self._sum_bytes(operation)) / shares.up
            case Kind.OFFLOAD:
                return rates.offload_s(self._sum_bytes(operation)) / shares.down
            case Kind.SAVE:
                return rates.offload_s(nbytes) / shares.down
            case Kind.PULL:  # state that is not page-locked
                return rates.fetch_s(nbytes) / rates.spec.pageable_share
            case Kind.PUSH:
                return rates.offload_s(nbytes) / rates.spec.pageable_share
            case Kind.HOLD:
                return rates.device_pass_s(2 * self._blocks[operation.block].size.offload_bytes)
            case Kind.READ | Kind.PAGE | Kind.RECALL | Kind.UNPARK:
                return rates.read_s(nbytes)
            case Kind.WRITE | Kind.STOW | Kind.PARK:
                return rates.write_s(nbytes)
            case Kind.SPILL:
                return rates.host_pass_s(2 * nbytes)
            case Kind.ROUND:
                return rates.host_pass_s(nbytes)
            case Kind.ADD:
                return rates.host_pass_s(nbytes) / shares.update
            case Kind.UPDATE:
                block = self._blocks[operation.block]
                if operation.on_device:
                    return rates.device_update_s(share_of(block.sizes, self._collectives.exchange.num_ranks))
                return rates.update_s(nbytes) / shares.update
            case Kind.HEAD:
                return (self._costs.head_forward_s + self._costs.outer_s) * operation.num_micro_batches
            case Kind.HEAD_BACKWARD:
                return self._costs.head_backward_s * operation.num_micro_batches
            case _:
                return 0.0

    def _sum_bytes(self, operation: Operation) -> float:
        """Return the bytes of a gradient on the link; of a sum that goes on, as the kernels keep it."""
        if operation.kind is Kind.EXCHANGE:
            return operation.nbytes * self._rates.kernels.sum_bytes / 4
        goes_on = operation.kind is Kind.LOAD or not operation.completes
        if not goes_on or operation.sums_on_host:
            return operation.nbytes
        size = self._blocks[operation.block].size
        each = size.share_bytes if operation.is_share else size.accumulator_bytes
        return min(operation.nbytes, self._rates.kernels.sum_bytes / 4 * len(operation.sums) * each)

    def _visit_s(self, operation: Operation) -> float:
        block = self._blocks[operation.block]
        if block.layer < 0:
            if not operation.is_head:
                return 0.0  # what outer blocks compute is the head's
            if operation.kind is Kind.FORWARD:
                return self._costs.head_forward_s + self._costs.outer_s
            return self._costs.head_backward_s
        if operation.kind is Kind.FORWARD:
            return self._costs.forward_s(block.layer) * block.share
        seconds = self._costs.backward_s(block.layer) * block.share
        if block.is_last:  # the others' recomputation is a visit of its own
            share = block.share if self._costs.passes_again(block.layer) else 1.0
            seconds += self._costs.inside_s(block.layer) * share
        return seconds
