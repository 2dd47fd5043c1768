"""From visits to a program: when each copy begins, and into which slot and buffer.

Fetches follow the four rules for one-disk prefetching with a known future: fetch the missing block that is
needed next; into the slot whose content is needed last; never evict what is needed sooner than what comes;
and as early as these allow.

Source: Cao, Felten, Karlin, Li, "A study of integrated prefetching and caching strategies", SIGMETRICS 1995;
eviction by furthest next use: Belady, IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatrain.plan.program.operations import BlockSize, Kind, LayerPlan, Operation, Program, Visit


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
    holds: bool = False,
    holds_sums: bool = False,
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
        holds: Complete gradients wait on the device; `optimizer_program` takes them home.
        holds_sums: What goes on adding up in a later round waits there too.

    Raises:
        AssertionError: More gradients add up at the same time than there are buffers.
    """
    placing = _Placing(visits, sizes, contents, pinned)
    rings = _Rings(visits, sizes, num_gradient_buffers, first_gradient_buffer, holds_sums=holds_sums)
    operations = placing.operations
    restores = deque(n for n, visit in enumerate(visits) if visit.is_backward and visit.saves)
    restored = -1
    staging = first_staging
    for position, visit in enumerate(visits):
        placing.prefetch(position)
        slot = placing.pass_block(visit.block)
        size = sizes[visit.block]
        if not visit.is_backward:
            operations.append(
                Operation(kind=Kind.FORWARD, block=visit.block, slot=slot, micro_batch=visit.micro_batch)
            )
            if visit.saves:
                operations.append(Operation(kind=Kind.SAVE, block=visit.block, micro_batch=visit.micro_batch))
            continue
        while restores and (restores[0] <= position or restored <= position):
            restored = restores.popleft()
            ahead = visits[restored]
            operations.append(Operation(kind=Kind.RESTORE, block=ahead.block, micro_batch=ahead.micro_batch))
        common: dict[str, Any] = {
            "block": visit.block,
            "micro_batch": visit.micro_batch,
            "adds": visit.adds,
            "loads": visit.loads,
            "is_last": visit.is_last,
            "completes": visit.completes,
        }
        if not size.is_trained or not size.is_streamed:
            operations.append(Operation(kind=Kind.BACKWARD, slot=slot, **common))
            continue
        operations += rings.loads_before(position)
        common["gradient_buffer"] = rings.use(visit)
        operations.append(Operation(kind=Kind.BACKWARD, slot=slot, **common))
        if not visit.is_last:
            continue
        if holds_sums or (holds and visit.completes):
            operations.append(Operation(kind=Kind.HOLD, waiting=visit.block, **common | {"micro_batch": 0}))
            continue
        nbytes = size.offload_bytes if visit.completes else size.accumulator_bytes
        common |= {"micro_batch": 0, "staging": staging if visit.completes and num_staging else -1}
        operations.append(Operation(kind=Kind.OFFLOAD, nbytes=nbytes, **common))
        if visit.completes and updates_at_once:
            operations.append(
                Operation(
                    kind=Kind.UPDATE,
                    block=visit.block,
                    staging=common["staging"],
                    follows_norm=False,
                    nbytes=size.update_bytes,
                )
            )
        staging = (staging + 1) % num_staging if common["staging"] >= 0 else staging
    return Program(tuple(operations), tuple(placing.slots))


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
        self._pinned = pinned
        self._order = [visit.block if sizes[visit.block].is_streamed else None for visit in visits]
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
            free = [slot for slot in range(len(self.slots)) if slot not in self._pinned]
            assert free, "every slot is pinned: a layer has more fragments than there are slots"
            victim = max(free, key=lambda slot: self._next_use(self.slots[slot]))
            if self._next_use(self.slots[victim]) < self._missing:
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
        return self._uses[block][-1] if block is not None and self._uses.get(block) else len(self._order)


class _Rings:
    """Which gradient buffer holds the sum of which block."""

    def __init__(
        self,
        visits: Sequence[Visit],
        sizes: Sequence[BlockSize],
        num_buffers: int,
        first: int,
        *,
        holds_sums: bool,
    ) -> None:
        self._holds_sums = holds_sums
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
        self._loading = deque(number for number in starts if visits[number].loads)
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
        if visit.block not in self._held and not visit.loads:
            self._take(visit.block)
        self._start = position if position in self._next_start else self._start
        while self._loading and self._loading[0] <= self._next_start[self._start]:
            number = self._loading[0]
            ahead = self._visits[number]
            if number > position and (not self._free or self._is_passed(ahead.block, position, number)):
                break
            self._loading.popleft()
            operations.append(
                Operation(
                    kind=Kind.LOAD,
                    block=ahead.block,
                    gradient_buffer=self._take(ahead.block),
                    loads=True,
                    completes=ahead.completes,
                    waiting=ahead.block if self._holds_sums else -1,
                    nbytes=0 if self._holds_sums else self._sizes[ahead.block].accumulator_bytes,
                )
            )
            if number > position:
                break
        return operations

    def _is_passed(self, block: int, start: int, stop: int) -> bool:
        """Whether a backward passes the block in visits `[start, stop)`: its sum is not there before."""
        return any(v.is_backward and v.block == block for v in self._visits[start:stop])

    def _take(self, block: int) -> int:
        assert self._free, "a layer has more fragments than there are gradient buffers"
        self._held[block] = self._free.popleft()
        return self._held[block]

    def _is_ours(self, visit: Visit) -> bool:
        return self._sizes[visit.block].is_trained and self._sizes[visit.block].is_streamed


def round_visits(
    layers: Sequence[LayerPlan],
    *,
    num_micro_batches: int = 1,
    first_trained: int = 0,
    loads: bool = False,
    completes: bool = True,
) -> list[Visit]:
    """List the visits of one round: all micro-batches pass a layer before the next is entered.

    Args:
        layers: In forward order.
        num_micro_batches: They start in reverse order, so that autograd, which takes what was made last
            first, adds up gradients in their own order.
        first_trained: Backward ends with this layer: neither it nor what is before it is trained.
        loads: Earlier rounds of the step left gradients to add to.
        completes: No later round of the step follows.
    """
    visits: list[Visit] = []
    for number, layer in enumerate(layers):
        # what is saved last is needed first: it stays where it is
        saves = layer.saves and number < len(layers) - 1
        visits += _forward(layer, num_micro_batches, saves=saves)
    made_again: set[int] = set()
    for number in range(len(layers) - 1, first_trained - 1, -1):
        layer = layers[number]
        if layer.drops and number not in made_again:
            start = number
            while start > 0 and layers[start].drops and start not in made_again:
                start -= 1
            for earlier in range(start, number):
                visits += _forward(layers[earlier], num_micro_batches)
                made_again.add(earlier + 1)
        for micro_batch in range(num_micro_batches):
            *others, _ = layer.blocks
            if layer.is_recomputed:
                visits += [Visit(block, micro_batch=micro_batch) for block in others]
            for index, block in enumerate(reversed(layer.blocks)):
                visits.append(
                    Visit(
                        block,
                        is_backward=True,
                        micro_batch=micro_batch,
                        adds=micro_batch > 0,
                        loads=loads,
                        is_last=micro_batch == num_micro_batches - 1,
                        completes=completes,
                        saves=layer.saves and number < len(layers) - 1 and index == 0,
                    )
                )
    return visits


def marked(seen: Sequence[Visit], *, loads: bool, completes: bool) -> list[Visit]:
    """Turn the bare visits of a round that was seen into visits to foresee; no activations are moved."""
    last = {visit.block: number for number, visit in enumerate(seen) if visit.is_backward}
    passed: set[int] = set()
    visits = []
    for number, visit in enumerate(seen):
        if not visit.is_backward:
            visits.append(visit)
            continue
        visits.append(
            replace(
                visit,
                adds=visit.block in passed,
                loads=loads,
                is_last=number == last[visit.block],
                completes=completes,
            )
        )
        passed.add(visit.block)
    return visits


def most_open(seen: Sequence[Visit]) -> int:
    """Count the blocks whose gradients add up at the same time, at most: the buffers that an order takes."""
    last = {visit.block: number for number, visit in enumerate(seen) if visit.is_backward}
    is_open: set[int] = set()
    most = 0
    for number, visit in enumerate(seen):
        if visit.is_backward:
            is_open.add(visit.block)
            most = max(most, len(is_open))
            if last[visit.block] == number:
                is_open.remove(visit.block)
    return most


def _forward(layer: LayerPlan, num_micro_batches: int, *, saves: bool = False) -> list[Visit]:
    return [
        Visit(block, micro_batch=micro_batch, saves=saves and block == layer.blocks[-1])
        for micro_batch in range(num_micro_batches - 1, -1, -1)
        for block in layer.blocks
    ]


def fetch_residents(sizes: Sequence[BlockSize], blocks: Iterable[int] | None = None) -> list[Operation]:
    """List the copies that bring resident blocks' new weights to the device, once per step."""
    return [
        Operation(kind=Kind.FETCH, block=block, nbytes=sizes[block].fetch_bytes)
        for block in (range(len(sizes)) if blocks is None else blocks)
        if not sizes[block].is_streamed and not sizes[block].updates_on_device
    ]


def offload_residents(sizes: Sequence[BlockSize], blocks: Sequence[int]) -> list[Operation]:
    """List the copies that take the gradients of resident `blocks` home, once per step."""
    return [
        Operation(kind=Kind.OFFLOAD, block=block, loads=True, nbytes=sizes[block].offload_bytes)
        for block in blocks
    ]


def optimizer_program(
    blocks: Sequence[int],
    sizes: Sequence[BlockSize] | None = None,
    *,
    updated: Collection[int] = (),
    held: Collection[int] = (),
    num_staging: int = 0,
) -> list[Operation]:
    """List the end of a step: the norm of `blocks`, then their updates in this order.

    Args:
        blocks: Those with a gradient, in the order in which the next forward wants them.
        sizes: Of all blocks, for the bytes that updates touch.
        updated: Blocks that were updated at once already.
        held: Blocks whose gradients wait on the device: each is taken home before its update, which need not
            wait for the norm.
        num_staging: Host buffers through which these pass, used in turn.
    """
    operations = [Operation(kind=Kind.NORM, blocks=tuple(blocks))]
    staging = 0
    for block in blocks:
        if block in updated:
            continue
        home = -1
        if block in held:
            assert sizes is not None
            home, staging = staging, (staging + 1) % num_staging
            operations.append(
                Operation(
                    kind=Kind.OFFLOAD,
                    block=block,
                    waiting=block if sizes[block].is_streamed else -1,
                    staging=home,
                    is_held=True,
                    nbytes=sizes[block].offload_bytes,
                )
            )
        nbytes = 0 if sizes is None else sizes[block].update_bytes
        operations.append(Operation(kind=Kind.UPDATE, block=block, staging=home, nbytes=nbytes))
    return operations
