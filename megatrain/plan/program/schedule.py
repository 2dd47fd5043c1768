"""The program of a list of visits: when each copy begins, and into which slot and buffer.

Fetches follow the four rules for one-disk prefetching with a known future: fetch the missing block that is
needed next; into the slot whose content is needed last; never evict what is needed sooner than what comes;
and as early as these allow.

Source: Cao, Felten, Karlin, Li, "A study of integrated prefetching and caching strategies", SIGMETRICS 1995;
eviction by furthest next use: Belady, IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.features.activations import Saving
from megatrain.plan.program.features.compute import Backward, Forward, head_pass
from megatrain.plan.program.features.gradients import coming, leaving
from megatrain.plan.program.features.ranks import RoundEnd
from megatrain.plan.program.features.weights import Fetch
from megatrain.plan.program.operations import Operation, Program
from megatrain.plan.program.visits import HEAD, ROUND_END, Visit


def schedule(
    visits: Sequence[Visit],
    sizes: Sequence[BlockSize],
    contents: Sequence[int | None],
    *,
    num_gradient_buffers: int = 1,
    first_gradient_buffer: int = 0,
    pinned: Collection[int] = (),
    outer: Sequence[int] = (),
    saved_bytes: Mapping[int, int] | None = None,
) -> Program:
    """Place fetches, loads, offloads and copies of activations around the visits of blocks.

    Gradients go home; where they wait elsewhere, or ranks exchange them, a feature's pass says so afterwards.

    Args:
        visits: The visits that the model will make, in order.
        sizes: The blocks' sizes, streamed or not.
        contents: The block that each slot holds at the start; None: nothing of use.
        num_gradient_buffers: The number of device buffers in which gradients add up, used in turn.
        first_gradient_buffer: The number of the first of these buffers to use.
        pinned: The slots that must keep their content.
        outer: The blocks in no layer, which the head reads.
        saved_bytes: The bytes that a micro-batch saves to the host, by block; none: they are not known.

    Raises:
        AssertionError: More gradients add up at the same time than there are buffers.
    """
    placing = _Placing(visits, sizes, contents, pinned)
    rings = _Rings(visits, sizes, num_gradient_buffers, first_gradient_buffer)
    operations = placing.operations
    saving = Saving(visits, saved_bytes or {})
    for position, visit in enumerate(visits):
        placing.prefetch(position)
        block = visit.block
        if block == HEAD:
            operations.append(head_pass(visit, tuple(outer)))
            continue
        if block == ROUND_END:
            operations.append(RoundEnd(visit=visit))
            continue
        slot = placing.pass_block(block, stays=visit.stays)
        size = sizes[block]
        if visit.is_backward or visit.restores >= 0:
            operations += saving.restores_before(position)
        arrival = saving.arrival_of(position)
        if visit.saves and not visit.is_backward:
            number = saving.next_number(visit)
            operations.append(Forward(block=block, visit=visit, slot=slot, saved=number))
            operations.append(saving.copy_after(visit, number))
        elif not visit.is_backward:
            operations.append(Forward(block=block, visit=visit, slot=slot, arrival=arrival))
        elif size.is_trained and size.is_streamed:
            operations += rings.loads_before(position)
            ring = rings.use(visit)
            operations.append(
                Backward(block=block, visit=visit, slot=slot, arrival=arrival, gradient_buffer=ring)
            )
            if visit.is_last:
                operations.append(leaving(visit, ring, size))
        elif size.is_trained or block not in outer:
            collects = size.is_trained
            operations.append(
                Backward(block=block, visit=visit, slot=slot, arrival=arrival, collects=collects)
            )
    return Program(tuple(operations), tuple(placing.slots))


class _Placing:
    """The slots with the block that is in each, and the fetches that this takes."""

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
        self._staying: set[int] = set()
        """The blocks that keep their slots until they are passed next."""
        self._missing = 0
        self._is_full, self._passed = False, -1
        """No slot could be given up when one was last looked for; the block that was passed last."""

    def prefetch(self, position: int) -> None:
        """Fetch whatever the rules allow before the visit at `position`."""
        if self._missing > position and self._is_full and self._next_use(self._passed) < self._missing:
            return  # the slots are as they were, but for that of the block that was just passed
        self._missing, self._is_full = max(self._missing, position), False
        while self._missing < len(self._order):
            block = self._order[self._missing]
            if block is None or block in self.slots:
                self._missing += 1
                continue
            assert self._free, "every slot is pinned: a layer has more fragments than there are slots"
            next_uses = [self._next_use(held) for held in self.slots]
            victim = max(self._free, key=next_uses.__getitem__)
            if next_uses[victim] < self._missing:
                self._is_full = True
                break
            self.slots[victim] = block
            nbytes = self._sizes[block].fetch_bytes
            self.operations.append(Fetch(block=block, slot=victim, nbytes=nbytes))

    def pass_block(self, block: int, *, stays: bool) -> int:
        """Return the block's slot, -1 if it is resident, and count the visit as done; see `Visit.stays`."""
        if not self._sizes[block].is_streamed:
            return -1
        self._uses[block].pop()
        if stays:
            self._staying.add(block)
        else:
            self._staying.discard(block)
        self._passed = block
        return self.slots.index(block)

    def _next_use(self, block: int | None) -> int:
        if block in self._staying:
            return -1
        uses = self._uses.get(block)  # type: ignore[arg-type]  # nothing has no uses
        return uses[-1] if uses else len(self._order)


class _Rings:
    """The gradient buffers with the block whose sum each holds."""

    def __init__(
        self, visits: Sequence[Visit], sizes: Sequence[BlockSize], num_buffers: int, first: int
    ) -> None:
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
        operations: list[Operation] = []
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
            operations.append(coming(ahead, self._take(ahead.block), self._sizes[ahead.block]))
            if number > position:
                break
        return operations

    def _is_passed(self, block: int, start: int, stop: int) -> bool:
        """Return whether a backward passes the block in visits `[start, stop)`: its sum comes no sooner."""
        return any(v.is_backward and v.block == block for v in self._visits[start:stop])

    def _take(self, block: int) -> int:
        assert self._free, "a layer has more fragments than there are gradient buffers"
        self._held[block] = self._free.popleft()
        return self._held[block]

    def _is_ours(self, visit: Visit) -> bool:
        size = self._sizes[visit.block]
        return visit.block != HEAD and size.is_trained and size.is_streamed
