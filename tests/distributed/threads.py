"""Ranks as threads of one process that take turns, and lanes that prove the order of all of them.

A thread runs until it has to wait for the others in a collective, then the next one goes on, with its own
state of torch's generator. So a run of several ranks is as repeatable as one of a single engine.

Vector clocks go over all lanes of all ranks. A collective merges the clocks of those who take part, in the
lane that it belongs to. What ranks share is one plane per kind of state: an UPDATE writes its rank's share of
a block, and a FETCH reads the shares of all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.operations import Lane
from megatrain.stream.lanes.base import Cause, Event, InlineLanes, OrderingError

_LANES = {"exchange": Lane.EXCHANGE, "norm": Lane.HOST, "spread": Lane.SPREAD, "caller": Lane.CALLER}
WAIT_S = 120.0


class Turns:
    """Lets one of several threads run at a time, and brings them together in collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lanes: list[RankLanes] = []
        self.last_write: dict[Any, tuple[tuple[int, Lane], int]] = {}
        self.last_reads: dict[Any, dict[tuple[int, Lane], int]] = {}
        self.memory: list[int] = []
        self._changed = threading.Condition()
        self._turn = 0
        self._rounds = [0] * size
        self._given: dict[int, dict[int, Any]] = {}
        self._ended: set[int] = set()
        self.error: BaseException | None = None

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

    def together(self, rank: int, lane: str, mine: Any) -> list[Any]:
        """Return what every rank gives in this collective, once all have come to it."""
        number = self._rounds[rank]
        self._rounds[rank] += 1
        clocks = None if not self.lanes else dict(self.lanes[rank].clock_of(_LANES[lane]))
        given = self._given.setdefault(number, {})
        given[rank] = (lane, mine, clocks)
        if len(given) < self.size:
            kept = torch.get_rng_state()
            with self._changed:
                self._pass_on(rank)
            while len(given) < self.size:
                self._take_turn(rank)
                if len(given) < self.size:
                    with self._changed:
                        self._pass_on(rank)
            torch.set_rng_state(kept)
        assert len({one[0] for one in given.values()}) == 1, f"ranks are in {given} at the same time"
        if clocks is not None:
            for _, _, other in given.values():
                self.lanes[rank].merge(_LANES[lane], other)
        return [given[other][1] for other in range(self.size)]

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

    def exchange(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        """Give every rank its part."""
        found = self._turns.together(self.rank, "exchange", mine.clone())
        start = sum(counts[: self.rank])
        return torch.stack([each[start : start + counts[self.rank]] for each in found])

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return everybody's tensor."""
        return list(self._turns.together(self.rank, lane, mine.clone()))

    def meet(self, lane: str = "caller") -> None:
        """Wait for everybody."""
        self._turns.together(self.rank, lane, None)

    def shared_memory(self, nbytes: int) -> int:
        """Return a descriptor of memory that all threads map."""
        own = None
        if self.rank == 0:
            own = os.memfd_create("ranks")
            os.ftruncate(own, max(nbytes, 1))
        first = self._turns.together(self.rank, "caller", own)[0]
        file = os.dup(first)
        self.meet()
        if own is not None:
            os.close(own)
        return file


class RankLanes(InlineLanes):
    """Lanes of one rank whose order is proved among all ranks; `CheckedLanes` proves that of one."""

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

    def _parts(self, buffer: Buffer, *, is_written: bool) -> list[Any]:
        """Name what a buffer is among all ranks."""
        kind, block = buffer
        if kind == "share":
            return [("state", block, self._rank)] if is_written else []
        if kind in ("working", "moments"):  # SPREAD, which has written nothing itself, writes these
            return [] if is_written else [("state", block, other) for other in range(self._turns.size)]
        return [(kind, block, self._rank)]

    def _wait_for(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        def kept(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            return tuple(buffer for buffer in buffers if (lane, buffer[0]) != self._skips)

        super()._wait_for(lane, kept(reads), kept(writes))

    def _access(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        clock, turns, me = self._clocks[lane], self._turns, (self._rank, lane)
        self.merge(lane, self._clocks[Lane.CALLER])  # who launches it has done that
        clock[me] = clock.get(me, 0) + 1
        read = [part for buffer in reads for part in self._parts(buffer, is_written=False)]
        written = [part for buffer in writes for part in self._parts(buffer, is_written=True)]
        for part in read + written:
            if part in turns.last_write:
                self._require(lane, part, *turns.last_write[part], "written")
        for part in written:
            for owner, tick in turns.last_reads.pop(part, {}).items():
                self._require(lane, part, owner, tick, "read")
            turns.last_write[part] = (me, clock[me])
        for part in read:
            turns.last_reads.setdefault(part, {})[me] = clock[me]

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
