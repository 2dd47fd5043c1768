"""Watches the state in RAM for bits that change by themselves, between one update of it and the next.

A block's state is only read from its update to its next one. So a part of it, a unit, is hashed right after
its update, by the thread that has made it and while it is in the cache, and compared right before the next
one. Units take turns: in a rotation of R steps each of them is watched for one step, and 1/R of the state is
at every moment. Frozen weights never change: all of them are hashed once, and 1/R of them is compared with
that in every step, so whatever changes there is found within R steps.

A hash is xxh3 of 64 bits. A single flipped bit always changes its sums over stripes, which are folded at the
end; it stays unnoticed once in 2^64 times. What is not watched: the moments of an update itself, gradients,
activations, buffers, and state that an update reads from drives, which has checksums there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import xxhash
from torch import Tensor, uint8

from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.errors import HardwareError
from megatrain.layout.blocks import BlockLayout
from megatrain.optim.pool import TASKS_PER_THREAD, default_pool
from megatrain.optim.tasks import Apart
from megatrain.optim.updates import RangePlanes
from megatrain.stream.execute.executor import Executor

UNIT_NUMEL = 1 << 17
"""The elements of a unit at most: with their planes and gradient they fit into the second cache of a core,
and handing them over costs a tenth of their update."""
MASTER_BYTES = 4
"""The bytes of an element's master: two of the working weight and two of the remainder, or all in one."""
FROZEN_BYTES = 1 << 20
"""The bytes of frozen weights that are hashed at once."""


class _Span(NamedTuple):
    """Units that adjoin: those of one parameter, or of one cut of it among ranks."""

    start: int
    """The first index in the block's state space."""
    stop: int
    number: int
    """The number of the first unit."""


class _Held(NamedTuple):
    """A unit that is watched at this moment."""

    place: tuple[int, int]
    """Its state indices."""
    planes: tuple[tuple[str, memoryview], ...]
    digests: tuple[int, ...]
    step: int
    """The step whose update has left it so."""


class _Frozen(NamedTuple):
    """A piece of frozen weights."""

    block: int
    plane: str
    name: str
    memory: memoryview


class MemoryWatch:
    """Hashes and compares units; one lane calls it, but for `check_all`, `forget` and `step`."""

    step: int = 0
    """The step that comes next, as checkpoints count; whoever counts steps sets it."""

    def __init__(
        self, executor: Executor, trained: Sequence[Sequence[tuple[int, int]]], rotation: int
    ) -> None:
        """Cut the state into units.

        Args:
            executor: The executor whose state it is.
            trained: By block, the state ranges of the parameters that are updated, in order.
            rotation: The number of steps in which each unit is watched once, R; 1: all are, always.
        """
        assert rotation >= 1, rotation
        self.rotation = rotation
        self._trained = trained
        self.take_part(executor)

    def take_part(self, executor: Executor) -> None:
        """Go on with an executor that is new: what it updates where is another thing."""
        self._executor = executor
        host, own = executor.host, executor.gradients.shared.updated
        host.planes.on_write = self.forget
        self._spans: list[list[_Span]] = []
        number = 0
        for block, ranges in enumerate(self._trained):
            spans = []
            for start, stop in ranges:
                for part in own[block].cut(start, stop):
                    spans.append(_Span(part.start, part.stop, number))
                    number += -(-len(part) // UNIT_NUMEL)
            self._spans.append(spans)
        self._turns = [0] * len(host.blocks)
        """By block: the updates that it has had."""
        self._held: list[dict[int, _Held]] = [{} for _ in host.blocks]
        """By block: the units that are watched, by number."""
        self._frozen = list(_own_frozen(executor))
        self._digests: list[int] | None = None
        """Of these, once they are hashed."""

    @property
    def trained_bytes(self) -> int:
        """Return the bytes of state of all units that are in RAM and updated there."""
        host, optimizer = self._executor.host, self._executor.host.optimizer
        count = 0.0
        for block, spans in enumerate(self._spans):
            if self._executor.spec.sizes[block].updates_on_device or host.on_drives.holds_state(block):
                continue
            for span in spans:
                count += (span.stop - span.start) * (MASTER_BYTES + optimizer.bytes_per_element)
        return int(count)

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of the frozen weights that this rank compares."""
        return sum(len(piece.memory) for piece in self._frozen)

    # -- trained state --------------------------------------------------------------------------------------

    def around(
        self, block: int, places: Sequence[tuple[int, int]], planes: Sequence[RangePlanes], step: int
    ) -> list[list[Apart]]:
        """Return the parts of an update that are watched, by range: compared before it, or hashed after it.

        Args:
            block: The block that is about to be updated.
            places: The state indices of each range of the update.
            planes: Its planes.
            step: The step of the update.
        """
        turn = self._turns[block]
        self._turns[block] += 1
        held, result = self._held[block], []
        for (start, stop), views in zip(places, planes, strict=True):
            parts = []
            for number, first, last in self._due(block, start, stop, turn):
                before = None if number not in held else partial(self._compare, block, held.pop(number), step)
                after = None
                if (number + turn) % self.rotation == 0:
                    seen = _cut(views, first - start, last - start)
                    after = partial(self._hash, block, number, (first, last), seen, step)
                parts.append(Apart(first - start, last - start, before, after))
            result.append(parts)
        return result

    def check(self, block: int, step: int) -> None:
        """Compare what is watched of a block, of which no update comes in a step that is skipped.

        Raises:
            HardwareError: Something has changed by itself, which may be why it is skipped.
        """
        for held in self._held[block].values():
            self._compare(block, held, step)

    def _due(self, block: int, start: int, stop: int, turn: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number, start, stop) of the units in a range that are watched, or will be, in order."""
        spans, rotation, held = self._spans[block], self.rotation, sorted(self._held[block])
        for span in spans[bisect_left(spans, start, key=lambda span: span.start) :]:
            if span.start >= stop:
                return
            count = -(-(span.stop - span.start) // UNIT_NUMEL)
            chosen = range((-turn - span.number) % rotation, count, rotation)
            # those that were chosen in an earlier turn, of which most are of the last one
            before = held[bisect_left(held, span.number) : bisect_left(held, span.number + count)]
            for index in sorted({*chosen, *(number - span.number for number in before)}):
                first = span.start + index * UNIT_NUMEL
                yield span.number + index, first, min(first + UNIT_NUMEL, span.stop)

    def _hash(
        self,
        block: int,
        number: int,
        place: tuple[int, int],
        planes: tuple[tuple[str, memoryview], ...],
        step: int,
    ) -> None:
        digests = tuple(xxhash.xxh3_64_intdigest(memory) for _, memory in planes)
        self._held[block][number] = _Held(place, planes, digests, step)

    def _compare(self, block: int, held: _Held, step: int) -> None:
        for (plane, memory), digest in zip(held.planes, held.digests, strict=True):
            if xxhash.xxh3_64_intdigest(memory) != digest:
                name = _name_at(self._executor.host.layouts[block], held.place[0])
                where = f"elements {held.place[0]:,} to {held.place[1]:,} of the block's state"
                when = f"after the update of step {held.step:,}, as was noticed in step {step:,}"
                raise self._fault(block, plane, f"{name} ({where})", when, held.step)

    # -- frozen weights -------------------------------------------------------------------------------------

    def check_frozen(self, step: int) -> None:
        """Compare those whose turn it is in a step; the first call hashes all of them.

        Raises:
            HardwareError: A weight has changed by itself.
        """
        self._visit_frozen(range((-step) % self.rotation, len(self._frozen), self.rotation), step)

    def check_all(self) -> None:
        """Compare all that is watched at this moment; no update may be under way.

        Raises:
            HardwareError: Something has changed by itself.
        """
        checks = [
            partial(self._compare, block, each, self.step)
            for block, held in enumerate(self._held)
            for each in held.values()
        ]
        _run(checks)
        self._visit_frozen(range(len(self._frozen)), self.step)

    def _visit_frozen(self, chosen: range, step: int) -> None:
        if self._digests is None:
            found: list[int] = [0] * len(self._frozen)
            self._since = [step] * len(self._frozen)

            def note(index: int) -> None:
                found[index] = xxhash.xxh3_64_intdigest(self._frozen[index].memory)

            _run([partial(note, index) for index in range(len(self._frozen))])
            self._digests = found
            return
        _run([partial(self._compare_frozen, index, step) for index in chosen])

    def _compare_frozen(self, index: int, step: int) -> None:
        assert self._digests is not None
        block, plane, name, memory = self._frozen[index]
        if xxhash.xxh3_64_intdigest(memory) != self._digests[index]:
            since = self._since[index]
            when = f"after step {since:,}, as was noticed in step {step:,}"
            raise self._fault(block, plane, f"{name}, which is frozen,", when, since)
        self._since[index] = step

    # -- both -----------------------------------------------------------------------------------------------

    def forget(self, block: int | None = None) -> None:
        """Forget what was hashed of a block, or of all: somebody writes there who may."""
        for number, held in enumerate(self._held):
            if block is None or number == block:
                held.clear()
        if any(block is None or piece.block == block for piece in self._frozen):
            self._digests = None

    def _fault(self, block: int, plane: str, what: str, when: str, since: int) -> HardwareError:
        error = HardwareError(
            f"a value in RAM has changed by itself: in block {block}, plane {plane}, {what} {when}",
            since=since,
        )
        self._executor.integrity.condemn(error)
        return error


def _run(calls: Sequence[Callable[[], object]]) -> None:
    """Run many short calls on the threads of updates."""
    pool = default_pool()
    share = max(1, -(-len(calls) // (pool.num_threads * TASKS_PER_THREAD)))

    def some(first: int) -> None:
        for call in calls[first : first + share]:
            call()

    pool.run([partial(some, first) for first in range(0, len(calls), share)])


def _own_frozen(executor: Executor) -> Iterator[_Frozen]:
    """Yield the pieces of frozen weights in RAM, of which the ranks of a node take turns."""
    host, ranks = executor.host, executor.gradients.shared.ranks
    number = 0
    for block, state in enumerate(host.blocks):
        if host.on_drives.holds_working(block) or host.on_device.holds(block):
            continue
        layout, bytes_here = state.layout, state.working.numpy()
        parts = [
            (entry.key, entry.byte_offset, entry.byte_offset + entry.nbytes)
            for entry in layout.entries
            if entry.state_offset is None and entry.encoding is None
        ]
        if layout.kept_bytes > layout.plain_bytes:
            name = f"the codes of {layout.encoded[0].key} and those behind it"
            parts.append((name, layout.plain_bytes, layout.kept_bytes))
        for name, start, stop in parts:
            for first in range(start, stop, FROZEN_BYTES):
                number += 1
                if number % ranks.local_size == ranks.local_rank:
                    piece = memoryview(bytes_here[first : min(first + FROZEN_BYTES, stop)])  # type: ignore[arg-type]
                    yield _Frozen(block, "working", name, piece)


def _cut(views: RangePlanes, start: int, stop: int) -> tuple[tuple[str, memoryview], ...]:
    """View elements [start, stop) of the planes of a range that an update changes."""
    numel = views.working.numel()
    found = [("working", views.working[start:stop])]
    if views.remainder is not None:
        found.append(("remainder", views.remainder[start:stop]))
    for name, plane in views.state.items():
        is_scale = plane.numel() != numel
        cut = slice(start // SCALE_NUMEL, -(-stop // SCALE_NUMEL)) if is_scale else slice(start, stop)
        found.append((name, plane[cut]))
    return tuple((name, _memory(part)) for name, part in found)


def _memory(part: Tensor) -> memoryview:
    return memoryview(part.view(uint8).numpy())  # type: ignore[arg-type]


def _name_at(layout: BlockLayout, index: int) -> str:
    """Return the parameter of a state index."""
    starts = [entry.state_offset or 0 for entry in layout.trained]
    return layout.trained[bisect_right(starts, index) - 1].key
