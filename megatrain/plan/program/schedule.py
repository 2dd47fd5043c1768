"""From visits to a program: when each copy begins, and into which slot and buffer.

Fetches follow the four rules for one-disk prefetching with a known future: fetch the missing block that is
needed next; into the slot whose content is needed last; never evict what is needed sooner than what comes;
and as early as these allow.

Source: Cao, Felten, Karlin, Li, "A study of integrated prefetching and caching strategies", SIGMETRICS 1995;
eviction by furthest next use: Belady, IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.kinds import Kind
from megatrain.plan.program.operations import Operation, Program
from megatrain.plan.program.saving import Saving
from megatrain.plan.program.visits import HEAD, ROUND_END, Visit

TierOf: TypeAlias = Callable[[int, bool], str]


def schedule(
    visits: Sequence[Visit],
    sizes: Sequence[BlockSize],
    contents: Sequence[int | None],
    *,
    num_gradient_buffers: int = 1,
    first_gradient_buffer: int = 0,
    pinned: Collection[int] = (),
    num_staging: int = 0,
    first_staging: int = 0,
    updates_at_once: bool = False,
    tier_of: TierOf | None = None,
    outer: Sequence[int] = (),
    saved_bytes: Mapping[int, int] | None = None,
    has_shares: bool = False,
) -> Program:
    """Place fetches, loads, offloads and copies of activations around the visits of blocks.

    Args:
        visits: What the model will do, in order.
        sizes: One per block, streamed or not.
        contents: What each slot holds at the start (None: nothing of use).
        num_gradient_buffers: Device buffers in which gradients add up, used in turn.
        first_gradient_buffer: The first one to use.
        pinned: Slots that must keep their content.
        num_staging: Host buffers through which complete gradients pass, used in turn; 0: the gradient plane.
        first_staging: The first one to use.
        updates_at_once: Every complete gradient is followed by its update (the `immediate` schedule).
        tier_of: Says where the gradient of a block, complete or not, waits for the norm: `host`, `device` or
            `nvme`. From the latter two `step.update_program` takes it home. None: the host.
        outer: Blocks in no layer, which the head reads.
        saved_bytes: By block: what a micro-batch saves to the host; none: not known.
        has_shares: Several ranks keep a share of each block, and update that.

    Raises:
        AssertionError: More gradients add up at the same time than there are buffers.
    """
    placing = _Placing(visits, sizes, contents, pinned)
    tier_of = tier_of or _on_host
    rings = _Rings(visits, sizes, num_gradient_buffers, first_gradient_buffer, tier_of)
    operations = placing.operations
    saving = Saving(visits, saved_bytes or {})
    staging = first_staging
    for position, visit in enumerate(visits):
        placing.prefetch(position)
        if visit.block == HEAD:
            operations.append(_pass_head(visit, outer))
            continue
        if visit.block == ROUND_END:
            trained = [block for block in outer if sizes[block].is_trained]
            operations += [exchanged(block, sizes[block], visit) for block in trained]
            continue
        slot = placing.pass_block(visit.block)
        size = sizes[visit.block]
        if visit.is_backward or visit.restores >= 0:
            operations += saving.restores_before(position)
        arrival = saving.arrival_of(position)
        if not visit.is_backward:
            operations += saving.forward(visit, slot, arrival)
            continue
        common: dict[str, Any] = {
            "block": visit.block,
            "micro_batch": visit.micro_batch,
            "adds": visit.adds,
            "loads": visit.loads,
            "is_last": visit.is_last,
            "completes": visit.completes,
            "is_head": visit.is_head,
            "sums_on_host": visit.sums_on_host,
            "is_share": visit.sums.exchanges,
        }
        visiting: dict[str, Any] = {"num_micro_batches": visit.num_micro_batches, "arrival": arrival}
        if not size.is_trained or not size.is_streamed:
            if size.is_trained or visit.block not in outer:
                operations.append(
                    Operation(kind=Kind.BACKWARD, slot=slot, collects=size.is_trained, **common, **visiting)
                )
            is_summed = size.is_trained and visit.is_last and common["is_share"]
            if is_summed and size.updates_on_device and visit.block not in outer:
                operations.append(exchanged(visit.block, size, visit))
            continue
        operations += rings.loads_before(position)
        common["gradient_buffer"] = rings.use(visit)
        operations.append(Operation(kind=Kind.BACKWARD, slot=slot, **common, **visiting))
        if not visit.is_last:
            continue
        common["micro_batch"] = 0
        if common["is_share"]:
            operations.append(exchanged(visit.block, size, visit, common["gradient_buffer"]))
        tier = tier_of(visit.block, visit.completes)
        if tier == "device":
            operations.append(Operation(kind=Kind.HOLD, waiting=visit.block, **common))
            continue
        if tier == "nvme":
            operations += parked(Operation(kind=Kind.OFFLOAD, **common), size, rings.next_staging())
            continue
        if visit.sums_on_host:
            common["staging"] = rings.next_staging()
            operations += added(Operation(kind=Kind.OFFLOAD, **common), size, visit.num_micro_batches)
            if visit.completes and updates_at_once:
                operations += _updated_at_once(visit.block, size)
            continue
        left = visit.sums.left
        nbytes = size.offload_bytes if visit.completes else len(left) * size.sum_bytes(visit.sums)
        common["staging"] = staging if visit.completes and num_staging else -1
        operations.append(Operation(kind=Kind.OFFLOAD, nbytes=nbytes, sums=left, **common))
        if visit.completes and updates_at_once:
            operations += _updated_at_once(visit.block, size, common["staging"], has_shares=has_shares)
        staging = (staging + 1) % num_staging if common["staging"] >= 0 else staging
    return Program(tuple(operations), tuple(placing.slots))


def _on_host(block: int, completes: bool) -> str:
    return "host"


def exchanged(block: int, size: BlockSize, visit: Visit, gradient_buffer: int = -1) -> Operation:
    """Return what makes the sum of all ranks' gradients of a block out of this rank's own.

    Args:
        block: Its number.
        size: Of it.
        visit: The last of the round.
        gradient_buffer: With this rank's sum; -1: the block's own.
    """
    sums = visit.sums
    return Operation(
        kind=Kind.EXCHANGE,
        block=block,
        gradient_buffer=gradient_buffer,
        completes=visit.completes,
        sums=sums.loaded if sums.are_shares else range(0),
        nbytes=size.exchange_bytes,
    )


def spread(update: Operation, size: BlockSize) -> list[Operation]:
    """List an update, and, of a rank's share, what brings those of the other ranks."""
    if not update.is_share:
        return [update]
    nbytes, on_device = size.spread_bytes, update.on_device
    return [update, Operation(kind=Kind.SPREAD, block=update.block, on_device=on_device, nbytes=nbytes)]


def gathered(operations: Sequence[Operation], sizes: Sequence[BlockSize]) -> list[Operation]:
    """List operations in which every rank fetches a piece of each block's weights, and all gather them."""
    found = []
    for operation in operations:
        size = sizes[operation.block] if operation.kind is Kind.FETCH else None
        if size is None or not size.gather_bytes:
            found.append(operation)
            continue
        found.append(replace(operation, is_share=True, nbytes=size.fetch_bytes - size.gather_bytes))
        found.append(replace(operation, kind=Kind.GATHER, nbytes=size.gather_bytes))
    return found


def _updated_at_once(
    block: int, size: BlockSize, staging: int = -1, *, has_shares: bool = False
) -> list[Operation]:
    return spread(
        Operation(
            kind=Kind.UPDATE,
            block=block,
            staging=staging,
            follows_norm=False,
            is_share=has_shares,
            nbytes=size.update_bytes,
        ),
        size,
    )


def added(offload: Operation, size: BlockSize, count: int) -> list[Operation]:
    """List what takes a gradient to the sum on the host: a copy to a staging buffer, and the addition.

    Args:
        offload: The copy.
        size: Of the block.
        count: How many micro-batches' gradients do so in these operations.
    """
    nbytes = (count - 1) * size.added_bytes
    nbytes += size.last_added_bytes if offload.completes else size.added_bytes
    add = Operation(
        kind=Kind.ADD,
        block=offload.block,
        staging=offload.staging,
        loads=True,
        completes=offload.completes,
        nbytes=nbytes,
    )
    return [replace(offload, nbytes=count * size.offload_bytes), add]


def parked(offload: Operation, size: BlockSize, staging: int) -> list[Operation]:
    """List the two copies of a gradient, or a sum, to the drives: to a staging buffer, and on from there."""
    nbytes = size.offload_bytes if offload.completes else size.accumulator_bytes
    through = replace(offload, staging=staging, nbytes=nbytes)
    return [through, _passed(Kind.PARK, through.block, size, staging, completes=through.completes)]


def unparked(block: int, size: BlockSize, staging: int, *, completes: bool = True) -> Operation:
    """Return the read of a gradient, or of a sum, from the drives into a staging buffer."""
    return _passed(Kind.UNPARK, block, size, staging, completes=completes)


def _passed(kind: Kind, block: int, size: BlockSize, staging: int, *, completes: bool) -> Operation:
    """Return what takes a gradient, or a sum that does not complete it, from a buffer to drives or back."""
    nbytes = size.parked_bytes if completes else size.parked_sum_bytes
    return Operation(kind=kind, block=block, staging=staging, completes=completes, nbytes=nbytes)


def _pass_head(visit: Visit, outer: Sequence[int]) -> Operation:
    return Operation(
        kind=Kind.HEAD_BACKWARD if visit.is_backward else Kind.HEAD,
        micro_batch=visit.micro_batch,
        num_micro_batches=visit.num_micro_batches,
        blocks=tuple(outer),
    )


class _Placing:
    """Which block is in which slot, and the fetches that this takes."""

    def __init__(
        self,
        visits: Sequence[Visit],
        sizes: Sequence[BlockSize],
        contents: Sequence[int | None],
        pinned: Collection[int],
    ) -> None:
        self.operations: list[Operation] = []
        self.slots = list(contents)
        self._sizes = sizes
        self._free = [slot for slot in range(len(self.slots)) if slot not in pinned]
        self._order = [
            visit.block if visit.block >= 0 and sizes[visit.block].is_streamed else None for visit in visits
        ]
        self._uses: dict[int, list[int]] = {}
        for position in range(len(visits) - 1, -1, -1):
            block = self._order[position]
            if block is not None:
                self._uses.setdefault(block, []).append(position)
        self._missing = 0

    def prefetch(self, position: int) -> None:
        """Fetch whatever the rules allow before the visit at `position`."""
        self._missing = max(self._missing, position)
        while self._missing < len(self._order):
            block = self._order[self._missing]
            if block is None or block in self.slots:
                self._missing += 1
                continue
            assert self._free, "every slot is pinned: a layer has more fragments than there are slots"
            next_uses = [self._next_use(held) for held in self.slots]
            victim = max(self._free, key=next_uses.__getitem__)
            if next_uses[victim] < self._missing:
                break
            self.slots[victim] = block
            nbytes = self._sizes[block].fetch_bytes
            self.operations.append(Operation(kind=Kind.FETCH, block=block, slot=victim, nbytes=nbytes))

    def pass_block(self, block: int) -> int:
        """Return the block's slot, -1 if it is resident, and count the visit as done."""
        if not self._sizes[block].is_streamed:
            return -1
        self._uses[block].pop()
        return self.slots.index(block)

    def _next_use(self, block: int | None) -> int:
        uses = self._uses.get(block)  # type: ignore[arg-type]  # nothing has no uses
        return uses[-1] if uses else len(self._order)


class _Rings:
    """Which gradient buffer holds the sum of which block."""

    def __init__(
        self,
        visits: Sequence[Visit],
        sizes: Sequence[BlockSize],
        num_buffers: int,
        first: int,
        tier_of: TierOf,
    ) -> None:
        self._tier_of = tier_of
        self._staging = -1
        self._free = deque((first + number) % num_buffers for number in range(num_buffers))
        self._held: dict[int, int] = {}
        self._visits = visits
        self._sizes = sizes
        starts = [
            n
            for n, visit in enumerate(visits)
            if visit.is_backward and not visit.adds and self._is_ours(visit)
        ]
        self._next_start = dict(zip([-1, *starts], [*starts, len(visits)], strict=True))
        self._loading = deque(number for number in starts if visits[number].needs_sum)
        self._start = -1

    def use(self, visit: Visit) -> int:
        """Return the buffer in which the visit's gradient adds up; the round's last visit gives it back."""
        ring = self._held[visit.block]
        if visit.is_last:
            del self._held[visit.block]
            self._free.append(ring)
        return ring

    def loads_before(self, position: int) -> list[Operation]:
        """List the loads to begin before the visit at `position`: its own, and the next if there is room."""
        operations = []
        visit = self._visits[position]
        if visit.block not in self._held and not visit.needs_sum:
            self._take(visit.block)
        self._start = position if position in self._next_start else self._start
        while self._loading and self._loading[0] <= self._next_start[self._start]:
            number = self._loading[0]
            ahead = self._visits[number]
            if number > position and (not self._free or self._is_passed(ahead.block, position, number)):
                break
            self._loading.popleft()
            operations += self._load(ahead)
            if number > position:
                break
        return operations

    def next_staging(self) -> int:
        """Return the host buffer through which the next gradient passes between the device and the drives."""
        self._staging = (self._staging + 1) % NUM_GRADIENT_STAGING
        return self._staging

    def _load(self, visit: Visit) -> list[Operation]:
        """List the copy of what earlier rounds added up, from where it waits."""
        block, size = visit.block, self._sizes[visit.block]
        tier = self._tier_of(block, False)
        load = Operation(
            kind=Kind.LOAD,
            block=block,
            gradient_buffer=self._take(block),
            loads=True,
            completes=visit.completes,
            waiting=block if tier == "device" else -1,
            is_share=visit.sums.are_shares,
            sums=visit.sums.loaded,
            nbytes=0 if tier == "device" else len(visit.sums.loaded) * size.sum_bytes(visit.sums),
        )
        if tier != "nvme":
            return [load]
        staging = self.next_staging()
        return [unparked(block, size, staging, completes=False), replace(load, staging=staging)]

    def _is_passed(self, block: int, start: int, stop: int) -> bool:
        """Whether a backward passes the block in visits `[start, stop)`: its sum is not there before."""
        return any(v.is_backward and v.block == block for v in self._visits[start:stop])

    def _take(self, block: int) -> int:
        assert self._free, "a layer has more fragments than there are gradient buffers"
        self._held[block] = self._free.popleft()
        return self._held[block]

    def _is_ours(self, visit: Visit) -> bool:
        size = self._sizes[visit.block]
        return visit.block != HEAD and size.is_trained and size.is_streamed
