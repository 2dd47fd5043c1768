"""Ranks as threads of one process that take turns, and lanes that prove the order of all of them.

A thread runs until it has to wait for the others in a collective, then the next one goes on, with its own
state of torch's generator. So a run of several ranks is as repeatable as one of a single engine.

Vector clocks go over all lanes of all ranks. A collective merges the clocks of those who take part, in the
lane that it belongs to. What the ranks of a node share is one plane per kind of state: an UPDATE writes its
rank's share of a block, a SPREAD those of its peers on other nodes, and a FETCH reads the shares of all. So
are the buffers before drives, into which each READ puts its rank's chunks, and the images there, of which
each WRITE writes its rank's chunks.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes.base import Cause, Event, InlineLanes, OrderingError

_LANES = {
    "gather": Lane.GATHER,
    "exchange": Lane.EXCHANGE,
    "near": Lane.EXCHANGE,
    "rail": Lane.EXCHANGE,
    "norm": Lane.HOST,
    "spread": Lane.SPREAD,
    "read": Lane.READ,
    "write": Lane.WRITE,
    "caller": Lane.CALLER,
    "orders": Lane.CALLER,
    "sequence": Lane.COMPUTE,
}
WAIT_S = 900.0


class Turns:
    """Lets one of several threads run at a time, and brings them together in collectives."""

    def __init__(self, size: int, num_nodes: int = 1) -> None:
        self.size, self.num_nodes = size, num_nodes
        self.lanes: list[RankLanes] = []
        self.last_write: dict[Any, tuple[tuple[int, Lane], int]] = {}
        self.last_reads: dict[Any, dict[tuple[int, Lane], int]] = {}
        self.memory: list[int] = []
        self._changed = threading.Condition()
        self._turn = 0
        self._rounds: Counter[Any] = Counter()
        self._given: dict[Any, dict[int, Any]] = {}
        self._ended: set[int] = set()
        self.error: BaseException | None = None
        self.given_up = 0

    def run(self, task: Callable[[ThreadRanks], Any]) -> list[Any]:
        """Run a task as every rank; return what each has returned."""
        found: list[Any] = [None] * self.size
        state = torch.get_rng_state()

        def one(rank: int) -> None:
            try:
                self._take_turn(rank)
                torch.set_rng_state(state)
                found[rank] = task(ThreadRanks(self, rank))
            except BaseException as error:
                with self._changed:
                    self.error = self.error or error
            finally:
                with self._changed:
                    self._ended.add(rank)
                    self._pass_on(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return found

    def together(self, rank: int, lane: str, mine: Any, members: Sequence[int] | None = None) -> list[Any]:
        """Return what every member, by default every rank, gives in this collective, once all are here."""
        members = tuple(members or range(self.size))
        number = self._rounds[rank, members]
        self._rounds[rank, members] += 1
        clocks = None if not self.lanes else dict(self.lanes[rank].clock_of(_LANES[lane]))
        given = self._given.setdefault((members, number), {})
        given[rank] = (lane, mine, clocks)
        if len(given) < len(members):
            kept = torch.get_rng_state()
            with self._changed:
                self._pass_on(rank)
            while len(given) < len(members):
                self._take_turn(rank)
                if len(given) < len(members):
                    with self._changed:
                        self._pass_on(rank)
            torch.set_rng_state(kept)
        assert len({one[0] for one in given.values()}) == 1, f"ranks are in {given} at the same time"
        if clocks is not None:
            for _, _, other in given.values():
                self.lanes[rank].merge(_LANES[lane], other)
        return [given[other][1] for other in members]

    def _take_turn(self, rank: int) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self._turn == rank or self.error, timeout=WAIT_S)
            assert done, "the ranks wait for each other"
            if self.error is not None:
                raise RuntimeError("another rank has failed")

    def _pass_on(self, rank: int) -> None:
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        left = [other for other in order if other not in self._ended]
        self._turn = left[0] if left else -1
        self._changed.notify_all()


class ThreadRanks:
    """One rank's view of the threads: what `Ranks` is for processes."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self.turns = self._turns = turns
        self.rank, self.size = rank, turns.size
        self.num_nodes, self.local_size = turns.num_nodes, turns.size // turns.num_nodes
        self.node, self.local_rank = divmod(rank, self.local_size)
        self.sent: Counter[str] = Counter()
        """By lane: bytes that went to others."""
        self.gathers = False
        self._step, self._is_in_step = 0, False

    @property
    def have_given_up(self) -> bool:
        """Whether a rank has given up the step that this one is at."""
        return self._is_in_step and self._step == self._turns.given_up

    def begin_step(self) -> None:
        """Count a step."""
        self._step += 1
        self._is_in_step = True

    def end_step(self) -> None:
        """Be at none."""
        self._is_in_step = False

    def give_up(self) -> None:
        """Let the other threads know."""
        self._turns.given_up = self._step

    def exchange(self, mine: Tensor, counts: Sequence[int], lane: str, parts: Tensor) -> Tensor:
        """Give every rank of the node, or of the rail, its part."""
        first = self.node * self.local_size
        members = range(first, first + self.local_size)
        if lane == "rail":
            members = range(self.local_rank, self.size, self.local_size)
        place = members.index(self.rank)
        self.sent[lane] += mine.element_size() * (sum(counts) - counts[place])
        found = self._turns.together(self.rank, lane, mine.clone(), members)
        start = sum(counts[:place])
        parts = parts.view(len(counts), counts[place])
        return parts.copy_(torch.stack([each[start : start + counts[place]] for each in found]))

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return everybody's tensor."""
        return list(self._turns.together(self.rank, lane, mine.clone()))

    def gather_values(self, mine: Any, lane: str = "caller") -> list[Any]:
        """Return everybody's value."""
        return self._turns.together(self.rank, lane, mine)

    def tell(self, value: Any = None) -> Any:
        """Return the first rank's value."""
        return self._turns.together(self.rank, "orders", value)[0]

    def neighbours(self, number: int) -> ThreadNeighbours:
        """Return those who share out rows with this one."""
        first = self.rank // number * number
        return ThreadNeighbours(self._turns, self.rank, tuple(range(first, first + number)))

    def gather_pieces(self, whole: Tensor) -> None:
        """Fill in the pieces of those of the node."""
        first = self.node * self.local_size
        pieces = whole.view(self.local_size, -1)
        own = pieces[self.local_rank].clone()
        self.sent["gather"] += (self.local_size - 1) * own.nbytes
        inside = range(first, first + self.local_size)
        for piece, found in zip(pieces, self._turns.together(self.rank, "gather", own, inside), strict=True):
            piece.copy_(found)

    def gather_shares(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Give everybody this rank's parts, and take theirs."""
        own = [part.clone() for part in parts[self.rank]]
        self.sent["gather"] += (self.size - 1) * sum(part.nbytes for part in own)
        for mine, values in zip(parts, self._turns.together(self.rank, "gather", own), strict=True):
            for part, value in zip(mine, values, strict=True):
                part.copy_(value)

    def meet(self, lane: str = "caller") -> None:
        """Wait for everybody, or for those of the node."""
        first = self.node * self.local_size
        inside = range(first, first + self.local_size) if lane == "spread" else None
        self._turns.together(self.rank, lane, None, inside)

    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Give the other nodes what this one has, and take theirs."""
        own = [part.clone() for part in parts[self.node]]
        self.sent["spread"] += (self.num_nodes - 1) * sum(part.nbytes for part in own)
        across = range(self.local_rank, self.size, self.local_size)
        found = self._turns.together(self.rank, "spread", own, across)
        for node, values in enumerate(found):
            for part, value in zip(parts[node], values, strict=True) if node != self.node else ():
                part.copy_(value)

    def shared_memory(self, nbytes: int) -> int:
        """Return a descriptor of memory that all threads of a node map."""
        own = None
        if self.local_rank == 0:
            own = os.memfd_create("ranks")
            os.ftruncate(own, max(nbytes, 1))
        first = self._turns.together(self.rank, "caller", own)[self.node * self.local_size]
        file = os.dup(first)
        self.meet()
        if own is not None:
            os.close(own)
        return file


class ThreadNeighbours:
    """What `Neighbours` is for processes, with a record of what they have swapped."""

    def __init__(self, turns: Turns, rank: int, members: tuple[int, ...]) -> None:
        self._turns, self._rank, self._members = turns, rank, members
        self.number, self.index = len(members), members.index(rank)
        self.swapped: list[tuple[int, ...]] = []

    def swap(self, parts: Tensor) -> Tensor:
        """Give every neighbour its part."""
        self.swapped.append(tuple(parts.shape))
        found = self._turns.together(self._rank, "sequence", parts.clone(), self._members)
        return torch.stack([each[self.index] for each in found])


class RankLanes(InlineLanes):
    """Lanes of one rank whose order is proved among all ranks; `CheckedLanes` proves that of one."""

    are_ordered = are_proved = True

    def __init__(
        self, turns: Turns, rank: int, *, skips: tuple[Lane, str] | None = None, checks: bool = True
    ) -> None:
        """Begin a rank's lanes.

        Args:
            turns: Of the ranks.
            rank: Whose lanes these are.
            skips: A lane that does not wait for buffers of a kind: a fault.
            checks: Whether that shows.
        """
        super().__init__(None)
        self._turns, self._rank = turns, rank
        self._skips, self._checks = skips, checks
        self._clocks: dict[Lane, dict[tuple[int, Lane], int]] = {lane: {} for lane in Lane}
        self._times: dict[int, int] = {}
        """By buffer before drives: how often something was put there."""
        assert len(turns.lanes) == rank
        turns.lanes.append(self)

    def clock_of(self, lane: Lane) -> dict[tuple[int, Lane], int]:
        """Return a lane's clock."""
        return self._clocks[lane]

    def merge(self, lane: Lane, other: dict[tuple[int, Lane], int]) -> None:
        """Let a lane know what another one does."""
        clock = self._clocks[lane]
        for owner, tick in other.items():
            clock[owner] = max(clock.get(owner, 0), tick)

    def freed(self, flat: Tensor) -> None:
        """Fill a freed buffer with NaN."""
        flat.fill_(0xFF)

    def _parts(self, lane: Lane, buffer: Buffer, *, is_written: bool) -> list[Any]:
        """Name what a buffer is among all ranks: of a plane, the shares, each of them once per node."""
        kind, block = buffer
        size, local_size = self._turns.size, self._turns.size // self._turns.num_nodes
        node, place = divmod(self._rank, local_size)
        if kind == "drive_staging":  # ("chunks", buffer, who has put them there, who uses them, which time)
            time = self._times.get(block, 0)
            if is_written:
                here = range(0) if lane is Lane.SPREAD else range(size)
                return [("chunks", block, self._rank, other, time) for other in here]
            if lane is Lane.HOST:
                return [("chunks", block, other, self._rank, time) for other in range(size)]
            own = ("chunks", block, self._rank, self._rank, time)
            return [own, *(("shares", block, other) for other in range(size))]
        if kind in ("drive", "spilled") and not is_written and lane is not Lane.READ:
            return [(kind, block, other) for other in range(size)]
        if kind == "share":
            return [("state", block, self._rank, node)] if is_written else []
        if kind == "working":  # SPREAD writes those of its peers on other nodes
            owners = range(place, size, local_size) if is_written else range(size)
            return [("state", block, o, node) for o in owners if not is_written or o != self._rank]
        if kind == "moments" and lane is Lane.HOST:  # SPILL, to drives of one node
            return [("state", block, other, node) for other in range(size)]
        if kind == "moments":
            return [] if is_written else [("state", block, self._rank, node)]
        return [(kind, block, self._rank)]

    def _wait_for(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        def kept(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            return tuple(buffer for buffer in buffers if (lane, buffer[0]) != self._skips)

        super()._wait_for(lane, kept(reads), kept(writes))

    def _access(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        clock, turns, me = self._clocks[lane], self._turns, (self._rank, lane)
        self.merge(lane, self._clocks[Lane.CALLER])  # who launches it has done that
        clock[me] = clock.get(me, 0) + 1
        for kind, number in writes:
            if kind == "drive_staging" and lane is not Lane.SPREAD:
                self._put_anew(lane, number)
        read = [part for buffer in reads for part in self._parts(lane, buffer, is_written=False)]
        written = [part for buffer in writes for part in self._parts(lane, buffer, is_written=True)]
        used = []  # what the next one to write there must wait for
        for kind, number in reads:
            if kind == "drive_staging" and lane is Lane.HOST:  # an update, of a share
                written.append(("shares", number, self._rank))
            elif kind == "drive_staging":
                time = self._times[number]
                used += [("written", number, other, self._rank, time) for other in range(turns.size)]
        for part in read + written:
            if part in turns.last_write:
                self._require(lane, part, *turns.last_write[part], "written")
        for part in written:
            for owner, tick in turns.last_reads.pop(part, {}).items():
                self._require(lane, part, owner, tick, "read")
            turns.last_write[part] = (me, clock[me])
        for part in read + used:
            turns.last_reads.setdefault(part, {})[me] = clock[me]

    def _put_anew(self, lane: Lane, number: int) -> None:
        """Put something into a buffer before drives: whoever has used what was there must be done."""
        time = self._times.get(number, 0)
        self._times[number] = time + 1
        places = [(number, self._rank, other, time) for other in range(self._turns.size)]
        for part in [(use, *place) for use in ("chunks", "written") for place in places]:
            for owner, tick in self._turns.last_reads.pop(part, {}).items():
                self._require(lane, part, owner, tick, "read")

    def _require(self, lane: Lane, part: Any, owner: tuple[int, Lane], tick: int, verb: str) -> None:
        if self._checks and self._clocks[lane].get(owner, 0) < tick:
            raise OrderingError(
                f"rank {self._rank}: lane {lane.value} uses {part} without waiting until lane "
                f"{owner[1].value} of rank {owner[0]} has {verb} it"
            )

    def _record(self, lane: Lane) -> Event:
        return Event(lane, clock=dict(self._clocks[lane]), is_recorded=True)  # type: ignore[arg-type]

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        super()._wait(lane, event, cause)
        self.merge(lane, event.clock)  # type: ignore[arg-type]
