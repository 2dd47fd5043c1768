"""The interface of all lanes, from buffers to waits, and the lanes of a CPU that is its own accelerator."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatrain.errors import CapacityError
from megatrain.optim.pool import default_pool
from megatrain.optim.sums import squares_of_chunks
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.store.arena import Arena
from megatrain.stream.lanes.records import Cause, Record, Recorder


class OrderingError(AssertionError):
    """A buffer was used without a wait that makes it safe, or an event waited for before it was recorded."""


@dataclass(slots=True)
class Event:
    """A point in a lane's order."""

    lane: Lane
    number: int = 0
    """Later events of a lane have larger ones."""
    is_recorded: bool = False
    """The lane was told to record it. A wait for an event of which this is not so would be no wait at all."""
    clock: dict[Lane, int] = field(default_factory=dict)
    """Vector clock of the lane at this point; checked lanes only."""
    launched: threading.Event | None = None
    """Set when the work before this point is done, or, in a stream, launched with `native` behind it. None:
    the work was done before the event was made."""
    native: Any = None
    """The device's own mark, valid once `launched` is set; None: `launched` says that the work is done."""
    done_s: float = 0.0
    """When the work was done; emulated lanes only."""

    @property
    def is_done(self) -> bool:
        """Whether the work is known to be done, so that nobody need wait for it any more."""
        return self.launched is None or (self.launched.is_set() and self.native is None)


class Lanes(ABC):
    """Enqueue work with the buffers it touches; waits follow.

    One thread at a time calls the methods: the launching thread, or autograd's while that one waits for it.
    Lane functions may call `copy`, `sum_of_squares`, `freed` and `share`, and nothing else.
    """

    updates_with_kernels: ClassVar[bool] = False
    """Blocks on the device update by the host's kernels, which give the same bits, in place of the operations
    of a GPU."""
    are_ordered: ClassVar[bool] = True
    """Operations have an order to be kept, or proved; False: each has run when the next one comes."""
    are_proved: ClassVar[bool] = False
    """Every access is checked."""

    def __init__(self, device: torch.device, device_limit: int | None = None) -> None:
        """Work on `device`, and allocate at most `device_limit` bytes there."""
        self.device = device
        self.device_limit = device_limit
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self._num_events = 0
        self._reached: dict[Lane, dict[Lane, int]] = {lane: {} for lane in Lane}
        """By lane, and by that for which it waits: the number of the newest event that it waits for."""
        self._writer: dict[Buffer, Event] = {}
        self._readers: dict[Buffer, dict[Lane, Event]] = {}
        self._causes: dict[tuple[Lane, Lane, str], Cause] = {}
        self._recorder = Recorder()
        self.squares_in_chunks = False
        """Sums of squares are made of those of chunks: their order is the same for any number of ranks."""
        self.judge: Callable[[BaseException], AbstractContextManager[object]] | None = None
        """Is given a failure before the launching thread raises it; inside, all lanes come to rest."""
        # Bounded, because what an exception leaves open stays at the bottom.
        self._open_spans: dict[Lane, deque[tuple[object, Any]]] = {
            lane: deque(maxlen=64) for lane in (Lane.COMPUTE, Lane.CALLER)
        }

    def enqueue(
        self,
        lane: Lane,
        function: Callable[[], object],
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        work: float = 0.0,
        label: object = "",
    ) -> None:
        """Run `function` in `lane`, after everything that the buffers require.

        Args:
            lane: The lane that runs it. `function` may run later and in another thread, without grad mode.
            function: The work to do; it keeps alive what it uses.
            reads: Buffers that it reads.
            writes: Buffers that it writes.
            work: Bytes that cross the link (FETCH, OFFLOAD, SAVE, RESTORE), bytes of host memory (HOST), or
                FLOPs (COMPUTE).
            label: The label of the work in the record, as `str` shows it when somebody reads that.

        Raises:
            BaseException: An earlier function of any lane raised it; nothing is enqueued then, and nothing
                that was enqueued before this call begins any more.
        """
        reads, writes = tuple(reads), tuple(writes)
        if self.are_ordered:
            self._prepare(lane, reads, writes)
        try:
            self._submit(lane, function, work, label)
        except BaseException as error:
            self._tell(error)
            raise
        finally:  # of a failure too: who uses the buffers next need not wait for what never comes
            if self.are_ordered:
                self._note(lane, reads, writes)

    def begin(
        self, lane: Lane, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = (), label: object = ""
    ) -> None:
        """Wait for the buffers before work that the calling thread does itself; `end` with the same buffers.

        COMPUTE: the thread launches work on the device. CALLER: it touches host memory, so it blocks until
        the buffers are there.

        Raises:
            BaseException: An earlier function raised it, as for `enqueue`.
        """
        assert lane in self._open_spans, f"begin is for work of the launching thread, not for {lane.value}"
        if self.are_ordered:
            self._prepare(lane, tuple(reads), tuple(writes))
        self._open_spans[lane].append((label, self._start_span(lane)))

    def end(
        self,
        lane: Lane,
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        work: float = 0.0,
    ) -> None:
        """Mark the end of the work that `begin` announced: so many FLOPs, for the record."""
        event = None
        if self.are_ordered:
            reads, writes = tuple(reads), tuple(writes)
            if self.are_proved:
                self._access(lane, reads, writes)
            event = self._note(lane, reads, writes)
        if self._open_spans[lane]:
            label, start = self._open_spans[lane].pop()
            self._end_span(lane, label, start, event, work)

    @contextmanager
    def using(
        self, lane: Lane, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()
    ) -> Iterator[None]:
        """Enclose work that the calling thread does itself in `begin` and `end`."""
        self.begin(lane, reads=reads, writes=writes)
        try:
            yield
        finally:
            self.end(lane, reads=reads, writes=writes)

    def begin_span(self, lane: Lane, label: object) -> None:
        """Note in the record what the calling thread does until `end_span`; nothing is waited for."""
        self._open_spans[lane].append((label, self._start_span(lane)))

    def end_span(self, lane: Lane, *, work: float = 0.0) -> None:
        """Mark the end of what `begin_span`, or a `begin` whose buffers `end` comes to later, announced."""
        if self._open_spans[lane]:
            label, start = self._open_spans[lane].pop()
            self._end_span(lane, label, start, None, work)

    def drain(self) -> None:  # noqa: B027 (nothing is ever left to do where operations run at once)
        """Block until every lane has done what was enqueued so far.

        Raises:
            BaseException: A function raised it and nobody was told.
        """

    def close(self) -> None:
        """Finish all work and end the lanes; a second call does nothing.

        Raises:
            BaseException: A function raised it, as for `drain`; the lanes have ended all the same.
        """
        self.drain()

    def take_record(self) -> Record:
        """Return the operations and waits that have ended since the last call; never blocks."""
        return self._recorder.take()

    def newest_s(self) -> float:
        """Return when the operation ended that was noted last, by `time.perf_counter`; 0 if none is kept.

        Any thread may call it, and nobody waits: while it stays the same, no lane makes progress.
        """
        return self._recorder.newest_s()

    def num_visits(self, since_s: float) -> int:
        """Count the visits that compute has done since a moment of `time.perf_counter`; never blocks.

        Any thread may call it. What `take_record` has taken is not counted.
        """
        return self._recorder.num_visits(since_s)

    def allocate(self, nbytes: int) -> Tensor:
        """Return (nbytes,) uint8 zeros on the device.

        Raises:
            CapacityError: The device budget does not hold them.
        """
        if self.device_limit is not None and self.device_bytes + nbytes > self.device_limit:
            raise CapacityError(
                f"the device budget of {self.device_limit:,} bytes cannot hold {nbytes:,} bytes more than "
                f"the {self.device_bytes:,} in use; use fewer slots (memory.num_slots), or a larger budget"
            )
        self.device_bytes += nbytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        if self.device.type == "cpu":  # zeroed by the kernel, when a page is first touched
            return Arena(nbytes).view(torch.uint8, 0, nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def lock(self, arena: Arena | None) -> None:  # noqa: B027 (nothing to do where the CPU is the device)
        """Make host memory ready for copies at the speed of the link; `close` undoes it."""

    def unlock(self, arena: Arena | None) -> None:  # noqa: B027 (nothing is locked where the CPU is the device)
        """Undo `lock`, before the memory is given back; all copies of it must be done."""

    def share(self, tensor: Tensor, lane: Lane) -> None:  # noqa: B027 (memory of a CPU has no streams)
        """Keep a device tensor's memory from reuse until `lane` has done what it has of it by then.

        For a tensor that a lane uses and another one made: call this before the last reference is dropped.
        """

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy flat tensors between host and device, or on the device, in the order of the running lane.

        As an operation does it: without a wait of the host where that can be.
        """
        target.copy_(source, non_blocking=True)

    def read_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns a small tensor on the host, as it is now.

        What is launched meanwhile is not waited for.
        """
        return lambda: tensor

    def computing(self) -> AbstractContextManager[object]:
        """Context in which a function of the HOST lane launches device work, in the order of compute."""
        return nullcontext()

    def free(self, buffers: Iterable[Tensor]) -> None:
        """Take buffers from `allocate` out of the account; the caller drops them."""
        self.device_bytes -= sum(buffer.numel() for buffer in buffers)

    def sum_of_squares(
        self, flats: Iterable[Iterable[Tensor]], out: Tensor, scratch: Tensor, sums: Tensor
    ) -> None:
        """Write the sum of squares of device tensors into `out`, a 0-dim float64 host or device tensor.

        Args:
            flats: Flat tensors, each in pieces of whole chunks, of which one is looked at before the next is
                asked for.
            out: Where the sum goes.
            scratch: float64 on the device, for pieces: (M + 1,) of M elements, or whole chunks where
                `squares_in_chunks`.
            sums: float64 on the device, for the sums of the chunks of a flat tensor, where these add up.
        """
        pool = default_pool()
        total = 0.0
        for flat in flats:
            squares: list[float] = []
            for piece in flat:
                if piece.numel():
                    squares += squares_of_chunks(pool, piece).tolist()
            total += math.fsum(squares)
        out.fill_(total)

    def squares_of_chunks(self, flat: Tensor, out: Tensor, scratch: Tensor) -> None:
        """Write the sum of squares of each chunk of a flat device tensor, in fp64, there.

        Args:
            flat: (N,) bfloat16 or float32.
            out: (chunks,) float64.
            scratch: float64, for whole chunks, which only an accelerator takes.
        """
        out.copy_(torch.from_numpy(squares_of_chunks(default_pool(), flat)))

    def sum_of_chunks(self, squares: Tensor) -> float:
        """Add up such sums, which are on the host, to what `sum_of_squares` makes of all chunks at once."""
        return math.fsum(squares.tolist())

    def available_bytes(self) -> int | None:
        """Bytes that may still be allocated on the device; None: unlimited."""
        return None if self.device_limit is None else self.device_limit - self.device_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use on the device so far: ours, and on an accelerator all that torch allocated."""
        return self.peak_device_bytes

    @property
    def matmul_flops_per_s(self) -> float | None:
        """Rate of matrix products on a device that is not really there; None: it can be measured."""
        return None

    def freed(self, flat: Tensor) -> None:  # noqa: B027 (most backends have nothing to do)
        """Take note that nobody may read a device buffer any more."""

    def _prepare(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        """Wait for the buffers before their use."""
        self._raise_failure()
        self._wait_for(lane, reads, writes)
        if self.are_proved:
            self._access(lane, reads, writes)

    def _wait_for(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        """Wait for whom the rule names, but not for what a lane did before something that was waited for.

        HOST may launch device work, which is not done when later work of HOST is.
        """
        reached = self._reached[lane]
        for buffer in reads + writes:
            event = self._writer.get(buffer)
            if event is None or (owner := event.lane) is lane:
                continue
            if owner is Lane.HOST or reached.get(owner, 0) < event.number:
                self._wait_once(lane, event, buffer)
        for buffer in writes:
            if readers := self._readers.get(buffer):
                for owner, event in readers.items():
                    if owner is not lane and (owner is Lane.HOST or reached.get(owner, 0) < event.number):
                        self._wait_once(lane, event, buffer)

    def _wait_once(self, lane: Lane, event: Event, buffer: Buffer) -> None:
        key = lane, event.lane, buffer[0]
        cause = self._causes.get(key)
        if cause is None:
            cause = self._causes[key] = Cause(*key)
        self._wait(lane, event, cause)
        self._reached[lane][event.lane] = event.number

    def _note(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> Event:
        event = self._record(lane)
        self._num_events = event.number = self._num_events + 1
        for buffer in writes:
            self._writer[buffer] = event
            self._readers.pop(buffer, None)
        for buffer in reads:
            self._readers.setdefault(buffer, {})[lane] = event
        return event

    def _access(  # noqa: B027 (most backends prove nothing)
        self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]
    ) -> None:
        """Check an access, where `are_proved`."""

    def _raise_failure(self) -> None:  # noqa: B027 (a function that runs at once raises at once)
        """Raise what a function in another thread has raised."""

    def _tell(self, error: BaseException) -> None:
        """Let `judge` know of a failure that the launching thread is about to raise."""
        if self.judge is not None:
            with self.judge(error):
                self._come_to_rest()

    def _come_to_rest(self) -> None:  # noqa: B027 (nothing is ever left to do where operations run at once)
        """Wait until what has begun is done; after a failure, nothing else begins."""

    def _start_span(self, lane: Lane) -> Any:
        return time.perf_counter()

    def _end_span(self, lane: Lane, label: object, start: Any, event: Event | None, work: float) -> None:
        self._recorder.note((lane, label, start, time.perf_counter(), work))

    def _run_now(self, lane: Lane, function: Callable[[], object], work: float, label: object) -> None:
        start_s = time.perf_counter()
        function()
        self._recorder.note((lane, label, start_s, time.perf_counter(), work))

    @abstractmethod
    def _submit(self, lane: Lane, function: Callable[[], object], work: float, label: object) -> None: ...

    @abstractmethod
    def _record(self, lane: Lane) -> Event: ...

    @abstractmethod
    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None: ...


class InlineLanes(Lanes):
    """The CPU as its own accelerator: every operation has run when `enqueue` returns."""

    are_ordered = False

    def __init__(self, device_limit: int | None = None) -> None:
        """Keep device buffers in host memory, at most `device_limit` bytes of them."""
        super().__init__(torch.device("cpu"), device_limit)

    def _submit(self, lane: Lane, function: Callable[[], object], work: float, label: object) -> None:
        start_s = time.perf_counter()
        function()
        self._recorder.note((lane, label, start_s, time.perf_counter(), work))

    def _record(self, lane: Lane) -> Event:
        return Event(lane, is_recorded=True)

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        if not event.is_recorded:
            raise OrderingError(f"{cause} waits for an event that is not recorded")
