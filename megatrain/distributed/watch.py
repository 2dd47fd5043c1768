"""The watch of ranks over each other: which one is silent, which one does not come, and what it did last.

Each rank *beats*: a thread of its own writes into the rendezvous store of `torch.distributed` who it is, what
it does, and how often it has waited for the others in each lane. A process that is stopped, or whose machine
is lost, no longer beats; one that hangs beats, but does not come. The first rank looks at all beats and the
others at those of the first, so the store has little to do. The first to find that one is missing puts its
sentence into the store, and every rank ends by it: in its next wait, or a few seconds later by the thread.

Others wait for a rank in a step no longer than the timeout. What it prepares, such as before its first step,
may take any time as long as it beats. So may a save or an evaluation, in which something moves besides: the
thread sees to that for its own rank.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.distributed.processes import machine, status_of
from megatrain.errors import RankError, as_ours

if TYPE_CHECKING:
    from torch.distributed import Store

    Beat = dict[str, Any]

_log = logging.getLogger(__name__)

_GRACE_S = 6.0
"""How long a rank may take to end by itself, once it is known that one is missing."""

_GONE_S = 1.0
"""How long a process may take to end after it has closed its connections."""

WAITS = {
    "gather": "weights that ranks gather",
    "exchange": "an exchange of gradients",
    "near": "an exchange of gradients in its node",
    "rail": "an exchange of gradients with other nodes",
    "norm": "the norm of the gradient",
    "spread": "the spread of new weights",
    "read": "state that ranks read from drives",
    "write": "state that ranks write to drives",
    "caller": "a meeting of all ranks",
    "orders": "the next order of rank 0",
    "sequence": "its part of the rows' tokens",
}
"""What ranks wait for, by lane: there are no others."""

_PATIENT = "orders"
"""Its waits take any time: the first rank reads, evaluates and saves meanwhile, and beats."""

_JOINED, _ALL = "megatrain/joined", "megatrain/all"
_LOST = "megatrain/lost"
_DONE = "megatrain/done"
_AGAIN = "The same command goes on from the newest checkpoint"


class _Moves:
    """Whether a thread does anything: by the CPU time that it uses.

    One that writes to a slow disk uses some with every page that gets there, and one that hangs in a lock, or
    in a file system that is gone, none. Other threads tell nothing: those of Gloo look around all the time.
    """

    def __init__(self) -> None:
        """Look at the thread that makes this, from another one."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._used_s = time.clock_gettime(self._clock)
        self._moved_s = time.monotonic()

    def idle_s(self) -> float:
        """Return for how long it has not moved."""
        used_s = time.clock_gettime(self._clock)
        if used_s > self._used_s:
            self._used_s, self._moved_s = used_s, time.monotonic()
        return time.monotonic() - self._moved_s

    def restart(self) -> None:
        """Forget how long it was: this process was stopped."""
        self._moved_s = time.monotonic()


class Watch:
    """One rank's part of it."""

    last_words: Callable[[str], object] | None = None
    """Is told why, where the thread has to end the process."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        """Say that this rank is there.

        Args:
            store: That all ranks reach; the watch has this connection for itself.
            rank: Whose watch it is.
            size: Number of ranks.
            timeout_s: How long a rank may be silent, or keep others waiting.
        """
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._others = [other for other in range(size) if other != rank]
        self._beat_s = min(timeout_s / 10, 1.0)
        self._doing, self._num_beats = "starting", 0
        self._moves: _Moves | None = None
        self._is_preparing = True
        self._calls: Counter[str] = Counter()
        self._waited_s: dict[str, float] = defaultdict(float)
        self._waits: dict[int, tuple[str, int, float]] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked_s = time.monotonic()
        self._lost: str | None = None
        self._is_first = False
        self._is_said = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._beat()

    def begin(self) -> None:
        """Wait until every rank has made its watch; then beat, and look at the others, until `close`.

        A rank may come at any time: it cannot beat before, and whoever has started it knows whether it lives.

        Raises:
            RankError: The store where they meet is gone.
        """
        with self.waiting(_PATIENT):
            if self._store.add(_JOINED, 1) == len(self._others) + 1:
                self._store.set(_ALL, "")
            while not self._store.check([_ALL]):
                time.sleep(self._beat_s / 5)
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """End the watch; leave word of the error that this rank ends with, if any."""
        self._closed.set()
        with suppress(RuntimeError):  # the store is gone, and so are those who would read it
            if isinstance(error, Exception) and not isinstance(error, RankError):
                self._store.set(_ended(self._rank), str(as_ours(error) or error) or type(error).__name__)
            elif self._lost is None:
                self._store.set(_left(self._rank), "")
        if self._thread.is_alive():
            self._thread.join()

    def doing(self, what: str, *, prepares: bool = False) -> None:
        """Let the others know what this rank does from now on.

        Args:
            what: In a few words.
            prepares: It may take any time, and keep others waiting, as long as this process lives.
        """
        self._doing, self._is_preparing = what, prepares

    @contextmanager
    def moving(self, what: str) -> Iterator[None]:
        """Do what may take any time, and keep others waiting, as long as this thread moves in it."""
        is_preparing = self._is_preparing
        self.doing(what)
        self._moves = _Moves()
        try:
            yield
        finally:
            self._moves, self._is_preparing = None, is_preparing

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
        thread = threading.get_ident()
        self._calls[lane] += 1
        self._waits[thread] = (lane, self._calls[lane], time.monotonic())
        try:
            yield
        except RuntimeError as error:
            raise self._error(self._why(str(error).strip().splitlines()[0])) from error
        finally:
            self._waited_s[lane] += time.monotonic() - self._waits.pop(thread)[2]

    def waited_s(self) -> list[float]:
        """Return by rank how long it has waited for others within steps so far, as it last said."""
        with suppress(RuntimeError):
            beats = self._read(self._others)
            own = {self._rank: {"waited_s": _sum(self._waited_s)}}
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
                found = self._store.compare_set(_LOST, "", f"{self._rank} {sentence}").decode()
            except RuntimeError:  # the store is gone too
                found = f"{self._rank} {sentence}"
            first, _, lost = found.partition(" ")
            self._is_first, self._lost = int(first) == self._rank, lost
        return self._lost

    def _run(self) -> None:
        """Beat and look, in a thread."""
        try:
            while not self._closed.wait(self._beat_s) and self._lost is None:
                self._beat()
                self._look_around()
        except RuntimeError as error:
            if not self._closed.wait(_GRACE_S):
                reason = str(error).strip().splitlines()[0]
                self._agree(f"the store where ranks meet does not answer ({reason}). {_AGAIN}")
        if self._lost is not None and not self._closed.wait(_GRACE_S):
            self._end(self._lost)

    def _end(self, lost: str) -> None:
        """End the process, whose main thread is at work or hangs; its files are whole at any time."""
        with suppress(Exception):
            if self.last_words is not None:
                self.last_words(lost)
            if self._is_first and not self._is_said:
                _log.error("error: %s", lost)
            tell_launcher(lost)
        os._exit(RankError.exit_code)

    def _beat(self) -> None:
        self._num_beats += 1
        waits = [lane for lane, _, _ in list(self._waits.values())]
        beat = {
            "number": self._num_beats,
            "host": socket.gethostname(),
            "processes": _processes(),
            "process": os.getpid(),
            "is_patient": self._is_preparing or self._moves is not None,
            "doing": self._doing + "".join(f", waiting for {WAITS[lane]}" for lane in waits[:1]),
            "calls": dict(self._calls),
            "waited_s": _sum(self._waited_s),
        }
        self._store.set(_beat_of(self._rank), json.dumps(beat))

    def _read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        beats = self._store.multi_get([_beat_of(rank) for rank in ranks])
        return {rank: json.loads(beat) for rank, beat in zip(ranks, beats, strict=True)}

    def _look_around(self) -> None:
        """Find out whether a rank is silent, this one hangs, or one does not come to where this one waits."""
        if self._store.check([_LOST]):
            self._agree("")
            return
        now, moves = time.monotonic(), self._moves
        if (
            now - self._looked_s > self._timeout_s / 2
        ):  # this process itself was stopped, and has seen nothing
            self._seen.clear()
            if moves is not None:
                moves.restart()
        self._looked_s = now
        if moves is not None and moves.idle_s() > self._timeout_s:
            (own,) = self._read([self._rank]).values()
            self._agree(
                f"{_name(self._rank, own)} hangs: nothing has moved for {moves.idle_s():.0f} s "
                f"(parallel.timeout is {self._timeout_s:g}), and it was last {self._doing}. {_AGAIN}"
            )
            return
        for rank, beat in self._read(self._others if self._rank == 0 else [0]).items():
            if _is_gone(beat) and not self._store.check([_left(rank)]):
                self._agree(self._ending(rank, beat))
                return
            number, since = self._seen.get(rank, (-1, now))
            if beat["number"] != number:
                self._seen[rank] = (beat["number"], now)
            elif now - since > self._timeout_s and not self._store.check([_left(rank)]):
                self._agree(
                    f"{_name(rank, beat)} is stopped or lost: it has been silent for {now - since:.0f} s "
                    f"(parallel.timeout is {self._timeout_s:g}), and was last {beat['doing']}. {_AGAIN}"
                )
                return
        for thread, (lane, number, since) in list(self._waits.items()):
            if lane != _PATIENT and now - since > self._timeout_s:
                self._name_late(thread, lane, number, since)

    def _name_late(self, thread: int, lane: str, number: int, since: float) -> None:
        """Find the rank that has not come to a lane as often as this one."""
        self._closed.wait(2 * self._beat_s)  # the others may have come in this moment, and say so then
        beats = self._read(self._others)
        if self._waits.get(thread) != (lane, number, since):
            return
        for rank, beat in beats.items():
            if beat["calls"].get(lane, 0) < number and not beat["is_patient"]:
                self._agree(
                    f"{_name(rank, beat)} hangs: rank {self._rank} waits for it in {WAITS[lane]} since "
                    f"{time.monotonic() - since:.0f} s (parallel.timeout is {self._timeout_s:g}), and it was "
                    f"last {beat['doing']}. {_AGAIN}"
                )
                return

    def _why(self, reason: str) -> str:
        """Say which rank has ended, as far as that can be known."""
        until = time.monotonic() + _GONE_S
        with suppress(RuntimeError):
            beats = self._read(self._others)
            while time.monotonic() < until and self._lost is None:
                for rank, beat in beats.items():
                    if self._store.check([_ended(rank)]) or _is_gone(beat):
                        return self._ending(rank, beat)
                time.sleep(_GONE_S / 20)
        return f"another rank has ended, or does not answer ({reason}). {_AGAIN}"

    def _ending(self, rank: int, beat: Beat) -> str:
        """Say how a rank has ended, by its own words if it left any."""
        if self._store.check([_ended(rank)]):
            self._is_said = rank == 0 and beat["processes"] == _processes()  # on the same screen
            return f"{_name(rank, beat)} has ended: {self._store.get(_ended(rank)).decode()}"
        return f"{_name(rank, beat)} has ended; it was last {beat['doing']}. {_AGAIN}"


def watch_idly(store: Store, timeout_s: float) -> None:
    """Return when the ranks that train have ended; the store may end with the first of them.

    Args:
        store: Where they meet.
        timeout_s: How long the first of them may be silent.

    Raises:
        RankError: They were lost.
    """
    seen, since = b"", time.monotonic()
    with suppress(RuntimeError):
        while not store.check([_DONE]):
            beat = store.get(_beat_of(0)) if store.check([_beat_of(0)]) else b""
            if beat != seen:
                seen, since = beat, time.monotonic()
            if store.check([_LOST]) or time.monotonic() - since > 2 * timeout_s:
                error = RankError(f"a rank of those that train is lost. {_AGAIN}")
                error.is_told = True
                raise error
            time.sleep(min(timeout_s / 10, 1.0))


def tell_launcher(sentence: str) -> None:
    """Leave the sentence that this process ends with to PyTorch's launcher, if it was started by that."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with suppress(OSError):  # it then knows the exit code alone
            Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))


def _sum(waited_s: Mapping[str, float]) -> float:
    return round(sum(seconds for lane, seconds in list(waited_s.items()) if lane != _PATIENT), 3)


def _beat_of(rank: int) -> str:
    return f"megatrain/beat/{rank}"


def _ended(rank: int) -> str:
    return f"megatrain/ended/{rank}"


def _left(rank: int) -> str:
    return _DONE if rank == 0 else f"megatrain/left/{rank}"


def _name(rank: int, beat: Beat) -> str:
    return f"rank {rank} (process {beat['process']} on {beat['host']})"


def _processes() -> str:
    """Say whose numbers of processes are those that this process sees: of which machine and container."""
    return f"{machine()} {os.readlink('/proc/self/ns/pid')}"


def _is_gone(beat: Beat) -> bool:
    """Whether a process has ended, as far as can be seen from here."""
    if beat["processes"] != _processes():
        return False
    status = status_of(beat["process"])
    return status is None or status[0] in "ZX"
