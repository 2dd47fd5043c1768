"""The watch of ranks over each other: which one is silent, which one does not come, and what it did last.

Each rank *beats*: a thread of its own writes into the rendezvous store of `torch.distributed` who it is, what
it does, and how often it has waited for the others in each lane. A process that is stopped, or whose machine
is lost, no longer beats; one that hangs beats, but does not come. The first rank looks at all beats and the
others at those of the first, so the store has little to do. The first to find that one is missing puts its
sentence into the store, and every rank ends by it: in its next wait, or a few seconds later by the thread.

Others wait for a rank in a step no longer than the timeout. What it prepares, such as before its first step,
may take any time as long as it beats. So may a save or an evaluation, in which something moves besides: the
thread sees to that for its own rank.

The store itself may be lost, with its machine or with the network. Then nothing answers, and nothing fails: a
second thread, which asks nobody, sees that the first one no longer comes round, and ends the process.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from megatrain.distributed.beats import (
    AGAIN,
    ALL,
    GIVEN_UP,
    JOINED,
    LOST,
    Beat,
    beat_of,
    ended,
    is_gone,
    left,
    name_of,
    place_of,
    processes_seen,
)
from megatrain.distributed.guard import Guard, Moves
from megatrain.distributed.processes import tell_launcher
from megatrain.distributed.waits import PATIENT, WAITS, Wait, Waits
from megatrain.errors import RankError, as_ours

if TYPE_CHECKING:
    from torch.distributed import Store

_log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""How long a rank may take to end by itself, once it is known that one is missing."""

_ENDING_S = 30.0
"""How long one may take that has saved what it had, and is about to end by itself."""

_WORDS_S = 2.0
"""How long it may take to write down why it is ended."""

_GONE_S = 1.0
"""How long a process may take to end after it has closed its connections."""


class Watch:
    """One rank's part of it."""

    last_words: Callable[[str], object] | None = None
    """Is told why, where a thread has to end the process."""
    at_end: Callable[[], str | None] | None = None
    """Does what is left to do before a thread ends the process, and returns what is to be said of it. None:
    another thread does it, and the process goes on for that."""
    is_first_here = True
    """This rank says what those of its machine find out each by itself."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        """Say that this rank is there.

        Args:
            store: The store that all ranks reach; the watch has this connection for itself.
            rank: The rank whose watch it is.
            size: The number of ranks.
            timeout_s: The time for which a rank may be silent, or keep others waiting.
        """
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._place = place_of(store)
        self._guard = Guard(timeout_s, self._see)
        self._clock = self._guard.clock
        self._others = [other for other in range(size) if other != rank]
        self._beat_s = min(timeout_s / 10, 1.0)
        self._doing, self._num_beats = "starting", 0
        self._moves: Moves | None = None
        self._is_preparing = True
        self._waits = Waits(self._clock)
        self._complete_s: dict[Wait, float] = {}
        """Since when all ranks have come to what this one waits for."""
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked_s = self._clock.now()
        self._lost: str | None = None
        self._lost_s = 0.0
        self._finishing: Callable[[], object] | None = None
        self._finished: object = None
        self._is_ending = False
        """The thread of the run knows that it is over, and comes to its end."""
        self._losing = threading.Lock()
        self._is_first = False
        self._is_said = False
        self._step, self._given_up = 0, 0
        """The number of the newest step, and of the newest one that a rank has given up."""
        self._is_in_step = False
        self._is_silent = False
        """Nothing is asked of the store any more: it would not answer."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def begin(self) -> None:
        """Wait until every rank has made its watch; then beat, and look at the others, until `close`.

        A rank may come at any time: it cannot beat before, and whoever has started it knows whether it lives.

        Raises:
            RankError: The store where they meet is gone.
        """
        self._guard.start()
        self._beat()
        with self.waiting(PATIENT):
            if self._store.add(JOINED, 1) == len(self._others) + 1:
                self._store.set(ALL, "")
            while not self._store.check([ALL]):
                self._guard.come_round()
                time.sleep(self._beat_s / 5)
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """End the watch; leave word of the error that this rank ends with, if any.

        The end of a process whose peers are lost is watched over to the last: it may wait for them, too.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        own = error if isinstance(error, Exception) and not isinstance(error, RankError) else None
        with suppress(RuntimeError):  # the store is gone, and so are those who would read it
            if own is not None and not self._is_silent:
                self._say_end(own)
            elif self._lost is None:
                self._store.set(left(self._rank), "")
        if self._lost is None and self._thread.is_alive():
            self._thread.join()
        if not isinstance(error, RankError):
            self._guard.close()

    def doing(self, what: str, *, prepares: bool = False) -> None:
        """Let the others know what this rank does from now on.

        Args:
            what: A description of it in a few words.
            prepares: A claim that it may take any time, and keep others waiting, as long as this process
                lives.
        """
        self._doing, self._is_preparing = what, prepares

    @contextmanager
    def moving(self, what: str) -> Iterator[None]:
        """Do what may take any time, and keep others waiting, as long as this thread moves in it."""
        is_preparing = self._is_preparing
        self.doing(what)
        self._moves = Moves(self._clock)
        try:
            yield
        finally:
            self._moves, self._is_preparing = None, is_preparing

    @contextmanager
    def finishing(self, progress: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Do the last work of this process though a rank is missing, as long as it goes on.

        Args:
            progress: The function whose value changes as it goes on, beside the CPU time of this thread.
        """
        moves, before = Moves(self._clock), self._finishing
        self._finishing, self._is_ending = lambda: (progress(), moves.used_s()), True
        self._lost_s = self._clock.now()
        try:
            yield
        finally:
            self._lost_s, self._finishing = self._clock.now(), before

    def begin_step(self) -> None:
        """Take note that a step begins; all ranks do, so its number is the same on all."""
        self._step += 1
        self._is_in_step = True

    def end_step(self) -> None:
        """Take note that it is over for this rank."""
        self._is_in_step = False

    def give_up(self) -> None:
        """Let the others know, with their next beats, that this rank gives up the step."""
        self._given_up = self._step
        with suppress(RuntimeError):  # the store is gone, which ends all
            self._store.set(GIVEN_UP, str(self._step))

    @property
    def has_given_up(self) -> bool:
        """Whether a rank is known to have given up the step that is going on."""
        return self._is_in_step and self._given_up == self._step

    def ends(self, error: Exception) -> None:
        """Let the others know at once of the error that this rank is going to end with."""
        with suppress(RuntimeError):  # the store is gone
            self._say_end(error)
            (own,) = self._read([self._rank]).values()
            self._agree(self._ending(self._rank, own))

    def _say_end(self, error: Exception) -> None:
        self._store.set(ended(self._rank), str(as_ours(error) or error) or type(error).__name__)

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be missing."""
        return self._lost is not None

    def look(self) -> None:
        """End a wait, if a rank is missing.

        Raises:
            RankError: One is.
        """
        if self._lost is not None:
            raise self._error(self._lost)

    @contextmanager
    def waiting(self, lane: str) -> Iterator[None]:
        """Let the others know that this rank waits for them.

        Raises:
            RankError: One has ended; torch raises errors that do not say which.
        """
        with self._waits.begin(lane):
            try:
                yield
            except RuntimeError as error:
                raise self._error(self._why(str(error).strip().splitlines()[0])) from error

    def launched(self, lane: str, is_done: Callable[[], bool]) -> None:
        """Let the others know that a device waits for them, where the host does not.

        Args:
            lane: The lane to which `waiting` has just come.
            is_done: The function that says whether the device has got through it; any thread may call.
        """
        self._waits.launched(lane, is_done)

    def waited_s(self) -> list[float]:
        """Return by rank how long it has waited for others within steps so far, as it last said."""
        if self._is_silent:
            return []
        with suppress(RuntimeError):
            beats = self._read(self._others)
            own = {self._rank: {"waited_s": self._waits.spent_s()}}
            return [found["waited_s"] for _, found in sorted((beats | own).items())]
        return []

    def _error(self, sentence: str) -> RankError:
        """Return the error that all ranks end with; the first one to know tells it."""
        error = RankError(self._agree(sentence))
        error.is_told = self._is_said or not self._is_first
        return error

    def _agree(self, sentence: str) -> str:
        """Return the sentence of the first rank that had one."""
        if self._lost is None:
            try:
                found = self._store.compare_set(LOST, "", f"{self._rank} {sentence}").decode()
            except RuntimeError:  # the store is gone too
                return self._lose(sentence, is_first=self.is_first_here)
            first, _, lost = found.partition(" ")
            return self._lose(lost, is_first=int(first) == self._rank)
        return self._lost

    def _lose(self, sentence: str, *, is_first: bool) -> str:
        """Know that a rank is missing, or that nobody can be asked; return what was said first."""
        with self._losing:
            if self._lost is None:
                self._is_first, self._lost, self._lost_s = is_first, sentence, self._clock.now()
            return self._lost

    def _run(self) -> None:
        """Beat and look, in a thread."""
        try:
            while not self._closed.wait(self._beat_s) and self._lost is None:
                self._beat()
                self._look_around()
                self._guard.come_round()
        except RuntimeError as error:
            if not self._closed.wait(_GRACE_S):
                self._agree(self._gone(str(error).strip().splitlines()[0]))

    def _see(self, silent_s: float) -> None:
        """Find out whether the store is silent, and end a process that does not end by itself."""
        if silent_s > self._timeout_s:
            self._is_silent = True
            self._lose(
                f"the store where ranks meet{self._place} has not answered for {silent_s:.0f} s "
                f"(parallel.timeout is {self._timeout_s:g}): its machine, or the network to it, is lost. "
                f"{AGAIN}",
                is_first=self.is_first_here,
            )
        if self._lost is None:
            return
        grace_s, finishing = _ENDING_S if self._is_ending else _GRACE_S, self._finishing
        if finishing is not None:
            grace_s = max(self._timeout_s, grace_s)
            if (progress := finishing()) != self._finished:
                self._finished, self._lost_s = progress, self._clock.now()
        if self._clock.now() - self._lost_s > grace_s:
            said = self.at_end() if self.at_end is not None and not self._is_ending else ""
            if said is not None:
                self._end(f"{self._lost} {said}".strip())

    def _end(self, lost: str) -> None:
        """End the process, whose main thread is at work or hangs; its files are whole at any time."""
        words = threading.Thread(target=self._leave_words, args=(lost,), daemon=True)
        words.start()
        words.join(_WORDS_S)
        os._exit(RankError.exit_code)

    def _leave_words(self, lost: str) -> None:
        """Say why the process ends; where it is written may be lost with the network, too."""
        with suppress(Exception):
            if self._is_first and not self._is_said and not self._closed.is_set():
                _log.error("error: %s", lost)
            tell_launcher(lost)
            if self.last_words is not None:
                self.last_words(lost)

    def _beat(self) -> None:
        self._num_beats += 1
        beat = {
            "number": self._num_beats,
            "host": socket.gethostname(),
            "processes": processes_seen(),
            "process": os.getpid(),
            "is_patient": self._is_preparing or self._moves is not None,
            "doing": self._doing
            + "".join(f", waiting for {WAITS[lane]}" for lane in self._waits.lanes()[:1]),
            "calls": dict(self._waits.calls),
            "waited_s": self._waits.spent_s(),
        }
        self._store.set(beat_of(self._rank), json.dumps(beat))

    def _read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        beats = self._store.multi_get([beat_of(rank) for rank in ranks])
        return {rank: json.loads(beat) for rank, beat in zip(ranks, beats, strict=True)}

    def _look_around(self) -> None:
        """Find out whether a rank is silent, this one hangs, or one does not come to where this one waits."""
        if self._store.check([LOST]):
            self._agree("")
            return
        if self._store.check([GIVEN_UP]):
            self._given_up = max(self._given_up, int(self._store.get(GIVEN_UP)))
        now, moves = self._clock.now(), self._moves
        if now - self._looked_s > self._timeout_s / 2:  # the store has kept this one waiting, too
            self._seen.clear()
        self._looked_s = now
        if moves is not None and moves.idle_s() > self._timeout_s:
            (own,) = self._read([self._rank]).values()
            self._agree(
                f"{name_of(self._rank, own)} hangs: nothing has moved for {moves.idle_s():.0f} s "
                f"(parallel.timeout is {self._timeout_s:g}), and it was last {self._doing}. {AGAIN}"
            )
            return
        for rank, beat in self._read(self._others if self._rank == 0 else [0]).items():
            if is_gone(beat) and not self._store.check([left(rank)]):
                self._agree(self._ending(rank, beat))
                return
            number, since = self._seen.get(rank, (-1, now))
            if beat["number"] != number:
                self._seen[rank] = (beat["number"], now)
            elif now - since > self._timeout_s and not self._store.check([left(rank)]):
                self._agree(
                    f"{name_of(rank, beat)} is stopped or lost: it has been silent for {now - since:.0f} s "
                    f"(parallel.timeout is {self._timeout_s:g}), and was last {beat['doing']}. {AGAIN}"
                )
                return
        self._look_at_waits()

    def _look_at_waits(self) -> None:
        """Find out whether a rank does not come to where this one waits, or all have come in vain."""
        late = self._waits.late(self._timeout_s)
        self._complete_s = {wait: self._complete_s[wait] for wait in late if wait in self._complete_s}
        if not late:
            return
        self._closed.wait(2 * self._beat_s)  # the others may have come in this moment, and say so then
        beats = self._read(self._others)
        for wait in late:
            if wait in self._waits:
                self._name_late(beats, wait)

    def _name_late(self, beats: Mapping[int, Beat], wait: Wait) -> None:
        """Find the rank that has not come to a lane as often as this one."""
        now, lane = self._clock.now(), wait.lane
        behind = {rank: beat for rank, beat in beats.items() if beat["calls"].get(lane, 0) < wait.number}
        for rank, beat in behind.items():
            if not beat["is_patient"]:
                self._agree(
                    f"{name_of(rank, beat)} hangs: rank {self._rank} waits for it in {WAITS[lane]} since "
                    f"{now - wait.since_s:.0f} s (parallel.timeout is {self._timeout_s:g}), and it was "
                    f"last {beat['doing']}. {AGAIN}"
                )
                return
        if behind:
            return
        complete_s = now - self._complete_s.setdefault(wait, now)
        if complete_s > self._timeout_s:
            self._agree(
                f"{WAITS[lane]} does not end on rank {self._rank}, and all ranks have come to it since "
                f"{complete_s:.0f} s (parallel.timeout is {self._timeout_s:g}): the network between them, or "
                f"a device, hangs. {AGAIN}"
            )

    def _why(self, reason: str) -> str:
        """Say which rank has ended, as far as that can be known."""
        until = time.monotonic() + _GONE_S
        try:
            beats = self._read(self._others)
            while time.monotonic() < until and self._lost is None:
                for rank, beat in beats.items():
                    if self._store.check([ended(rank)]) or is_gone(beat):
                        return self._ending(rank, beat)
                time.sleep(_GONE_S / 20)
        except RuntimeError:
            return self._gone(reason)
        return f"another rank has ended, or does not answer ({reason}). {AGAIN}"

    def _gone(self, reason: str) -> str:
        """Say that the store has ended."""
        return (
            f"the store where ranks meet{self._place} has ended, with the launcher or the rank that had it "
            f"({reason}). {AGAIN}"
        )

    def _ending(self, rank: int, beat: Beat) -> str:
        """Say how a rank has ended, by its own words if it left any."""
        if self._store.check([ended(rank)]):
            self._is_said = rank == 0 and beat["processes"] == processes_seen()  # on the same screen
            return f"{name_of(rank, beat)} has ended: {self._store.get(ended(rank)).decode()}"
        return f"{name_of(rank, beat)} has ended; it was last {beat['doing']}. {AGAIN}"
