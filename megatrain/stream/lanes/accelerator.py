"""Streams and events of one accelerator, one launcher thread per lane. Has run on the test device alone.

Who waits for whom, and where. An event is *launched* once its operation was launched and its stream's event
recorded behind it, or, in HOST, once its operation is done. A stream takes a wait for an event that is not
yet recorded as no wait, so every wait is for `launched` first:

| waiting | for a stream | for HOST |
|---|---|---|
| a copy lane | its launcher thread for `launched`, then its stream for the event | its launcher thread |
| COMPUTE | the launching thread for `launched`, then its current stream | the launching thread |
| HOST | its thread for `launched`, then for the event | (its own order) |
| CALLER | the launching thread for `launched`, then for the event | the launching thread |

The device is never synchronised in `enqueue`, `begin`, `end` or `take_record`.

An operation is timed in every step, for reports and traces, and that makes no event of the device: one is
recorded anew when nobody holds the mark that it was before (`Marks`). What a stream was told to wait for, it
waits for all the same, since it takes an event as it is recorded then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatrain.hardware.accelerators import free_bytes, peak_bytes, reset_peak_bytes, vendor_of
from megatrain.optim.sums import (
    chunk_squares_on_device,
    squares_on_device,
    tree_squares_on_device,
    tree_sum,
)
from megatrain.plan.program.kinds import Lane
from megatrain.store.arena import Arena
from megatrain.stream.lanes.base import Event
from megatrain.stream.lanes.locked_ring import BUFFER_BYTES, NUM_BUFFERS, LockedRing, until_done
from megatrain.stream.lanes.records import Cause, Record, Recorder
from megatrain.stream.lanes.threads import Failure, ThreadedLanes, Worker

_log = logging.getLogger(__name__)

_COPY_LANES = (Lane.FETCH, Lane.OFFLOAD, Lane.SAVE, Lane.RESTORE, Lane.GATHER, Lane.EXCHANGE)
_HOST_LANES = (Lane.HOST, Lane.READ, Lane.PAGE, Lane.WRITE, Lane.STOW, Lane.RECALL, Lane.SPREAD)
MAX_UNRESOLVED = 512
"""Events kept per lane before their times are looked up, should nobody take the record."""
REBASE_S = 8.0
"""CUDA tells the time between two events in single precision: at 8 s that is still exact to a microsecond."""
SLOW_LOCK_S = 2.0
"""Seconds of page-locking after which the log says what takes so long."""
_NO_LOCK = (
    "torch cannot page-lock the state's memory for %s: copies go through %d page-locked buffers of %d MiB in "
    "each lane, and the host copies every byte once more"
)


class Mark:
    """A point in a stream. Its event goes back to the others when nobody holds it any more."""

    __slots__ = ("_free", "event")

    def __init__(self, event: torch.Event, free: deque[torch.Event]) -> None:
        """Hold an event that is recorded, and came from `free`."""
        self.event = event
        self._free = free

    def __del__(self) -> None:
        """Give the event back; from whichever thread lets go last."""
        self._free.append(self.event)


class Marks:
    """Events of one device, with timing, each made once; every thread may call."""

    def __init__(self, device: torch.device) -> None:
        """Start without any."""
        self._device = device
        self._free: deque[torch.Event] = deque()

    def record(self, stream: torch.Stream) -> Mark:
        """Return a mark behind what `stream` was given so far."""
        try:
            event = self._free.popleft()
        except IndexError:
            event = torch.Event(device=self._device, enable_timing=True)
        event.record(stream)
        return Mark(event, self._free)


class DeviceSpans:
    """Spans between events of streams, turned into host time as they complete; every thread may call.

    The device's clock drifts from the host's by a few millionths; `anchor` ties them again.
    """

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        """Tie the clocks: waits for the device once."""
        self._device = device
        self._recorder = recorder
        self.marks = Marks(device)
        self._lock = threading.Lock()
        self._pending: dict[Lane, deque[tuple[object, Mark, Mark, float]]] = {lane: deque() for lane in Lane}
        self.anchor()

    def anchor(self) -> None:
        """Tie the device's clock to the host's. Waits for the current stream."""
        reference = self.marks.record(torch.accelerator.current_stream(self._device))
        reference.event.synchronize()
        with self._lock:
            self._reference, self._reference_s = reference, time.perf_counter()

    def add(self, lane: Lane, label: object, start: Mark, end: Mark, work: float = 0.0) -> None:
        """Note an operation between two marks."""
        with self._lock:
            pending = self._pending[lane]
            pending.append((label, start, end, work))
            if len(pending) > MAX_UNRESOLVED:
                self._resolve(lane, at_most=2)

    def resolve(self) -> None:
        """Hand the spans that are complete to the recorder."""
        with self._lock:
            for lane, pending in self._pending.items():
                self._resolve(lane, at_most=len(pending))

    def _resolve(self, lane: Lane, at_most: int) -> None:
        pending = self._pending[lane]
        for _ in range(at_most):
            label, start, end, work = pending[0]
            if not end.event.query():  # an operation ends after those before it in its lane
                return
            pending.popleft()
            start_s = self._seconds(start)
            end_s = start_s + start.event.elapsed_time(end.event) / 1e3
            self._recorder.note((lane, label, start_s, end_s, work))

    def _seconds(self, mark: Mark) -> float:
        """Return the host's time of a mark that is passed; the time is negative before the reference."""
        elapsed_s = self._reference.event.elapsed_time(mark.event) / 1e3
        mark_s = self._reference_s + elapsed_s
        if elapsed_s > REBASE_S:
            self._reference, self._reference_s = mark, mark_s
        return mark_s


class StreamWorker(Worker):
    """Launches one lane's operations into its stream."""

    def __init__(
        self, lane: Lane, failure: Failure, recorder: Recorder, stream: torch.Stream, spans: DeviceSpans
    ) -> None:
        """Launch into `stream`."""
        super().__init__(lane, failure, recorder)
        self._stream = stream
        self._spans = spans
        self._open: tuple[object, Mark, float] | None = None

    def _context(self) -> AbstractContextManager[object]:
        return _on_stream(self._stream)

    def _wait(self, event: Event, cause: Cause) -> None:
        self._until_launched(event, cause)
        if event.native is not None:
            self._stream.wait_event(event.native.event)

    def _run(self, function: Callable[[], object], work: float, label: object, enqueued_s: float) -> None:
        # behind the stream's waits: it passes when the operation begins
        start = self._spans.marks.record(self._stream)
        function()
        self._open = (label, start, work)

    def _set(self, event: Event) -> None:
        try:
            event.native = self._spans.marks.record(self._stream)
            if self._open is not None:
                label, start, work = self._open
                self._open = None
                self._spans.add(self.lane, label, start, event.native, work)
        finally:  # whoever waits must go on even if the device has failed
            super()._set(event)


class HostWorker(Worker):
    """Runs functions on the host, after what they need has arrived there.

    It has a stream of its own, so that what little a function reads from the device does not queue up behind
    compute.
    """

    def __init__(
        self, lane: Lane, failure: Failure, recorder: Recorder, stream: torch.Stream, marks: Marks
    ) -> None:
        """Use `stream` for what functions read from the device."""
        super().__init__(lane, failure, recorder)
        self._stream = stream
        self._marks = marks
        self.launched_into: torch.Stream | None = None
        """Where the operation that runs has launched device work, which is not done when it returns."""

    def _set(self, event: Event) -> None:
        stream, self.launched_into = self.launched_into, None
        try:
            if stream is not None:
                event.native = self._marks.record(stream)
        finally:
            super()._set(event)

    def _context(self) -> AbstractContextManager[object]:
        return _on_stream(self._stream)

    def _wait(self, event: Event, cause: Cause) -> None:
        start_s = time.perf_counter()
        assert event.launched is not None
        event.launched.wait()
        if event.native is not None:
            until_done(event.native.event)
        self._recorder.waited(cause, start_s)


class AcceleratorLanes(ThreadedLanes):
    """Copy lanes are streams with a launcher thread each, HOST is a thread, COMPUTE the current stream."""

    def __init__(self, device: torch.device, device_limit: int | None = None) -> None:
        """Create one stream for each lane; compute runs in the calling thread's current stream."""
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        super().__init__(torch.device(device.type, index), device_limit)
        self._vendor = vendor_of(self.device)
        self._compute_stream = torch.accelerator.current_stream(self.device)
        self._streams = {lane: torch.Stream(device=self.device) for lane in (*_COPY_LANES, *_HOST_LANES)}
        self._spans = DeviceSpans(self.device, self._recorder)
        self._locked: list[Arena] = []
        self._rings = threading.local()
        if self._vendor.lock is None:
            _log.warning(_NO_LOCK, self._vendor.title, NUM_BUFFERS, BUFFER_BYTES >> 20)
        reset_peak_bytes(self.device)

    def newest_s(self) -> float:
        """Return when the operation ended that was noted last; see the base."""
        self._spans.resolve()
        return super().newest_s()

    def num_visits(self, since_s: float) -> int:
        """Count the visits that the device has done; see the base."""
        self._spans.resolve()
        return super().num_visits(since_s)

    def take_record(self) -> Record:
        """Return what has ended since the last call; never blocks, and never waits for the device."""
        self._spans.resolve()
        return super().take_record()

    def allocate(self, nbytes: int) -> Tensor:
        """Return (nbytes,) uint8 zeros on the device, which every stream may use at once."""
        buffer = super().allocate(nbytes)
        # The zeros are written in the current stream, which no operation declares: a first fetch would race.
        torch.accelerator.current_stream(self.device).synchronize()
        return buffer

    def lock(self, arena: Arena | None) -> None:
        """Page-lock host memory; copies of other memory go through a `LockedRing`."""
        if arena is None or self._vendor.lock is None or any(held is arena for held in self._locked):
            return
        self._locked.append(arena)  # a refused one too: it is asked for once, and has nothing to unlock
        gib = arena.nbytes / (1 << 30)
        slow = threading.Timer(SLOW_LOCK_S, _log.info, ["page-locking %.1f GiB of host memory", gib])
        slow.daemon = True
        slow.start()
        try:
            is_locked = arena.lock(self._vendor)
        finally:
            slow.cancel()
        if not is_locked:
            _log.warning(
                "%.1f GiB of host memory could not be page-locked: its copies will be slower than the link",
                gib,
            )

    def unlock(self, arena: Arena | None) -> None:
        """Undo `lock`."""
        if arena is not None:
            arena.unlock()
            self._locked = [held for held in self._locked if held is not arena]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy in the current stream; what is not page-locked, or changes its dtype, through a `LockedRing`.

        Torch would make the calling thread wait, and would convert too early: what a stream has still to put
        there is not there yet.
        """
        here = target if target.device.type == "cpu" else source
        if here.device.type != "cpu" or (target.dtype == source.dtype and here.is_pinned()):
            target.copy_(source, non_blocking=True)
            return
        if source is here and here.is_pinned():  # an earlier copy, in a stream, may still be writing it
            until_done(self._spans.marks.record(torch.accelerator.current_stream(self.device)).event)
        ring = getattr(self._rings, "ring", None)
        if ring is None:
            ring = self._rings.ring = LockedRing(self.device)
        ring.copy(target, source)

    def read_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns a small tensor on the host, once what was launched is done."""
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        here.copy_(tensor, non_blocking=True)
        mark = self._spans.marks.record(torch.accelerator.current_stream(self.device))

        def read() -> Tensor:
            until_done(mark.event)
            return here

        return read

    def share(self, tensor: Tensor, lane: Lane) -> None:
        """Keep a device tensor's memory from reuse until what `lane` was given of it is done.

        The allocator looks at the lane's stream when the last reference goes, and a function that is still to
        be launched holds one.
        """
        if tensor.device.type == self.device.type:
            tensor.record_stream(self._stream(lane))

    def computing(self) -> AbstractContextManager[object]:
        """The stream that was current when the lanes were made: what compute runs in."""
        return self._computing()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        worker = self._workers[Lane.HOST]
        assert isinstance(worker, HostWorker)
        worker.launched_into = self._compute_stream
        with _on_stream(self._compute_stream):
            yield

    def sum_of_squares(
        self, flats: Iterable[Iterable[Tensor]], out: Tensor, scratch: Tensor, sums: Tensor
    ) -> None:
        """Sum on the device, in the current stream, without a wait of the host."""
        if self.squares_in_chunks:
            tree_squares_on_device(flats, out, scratch, sums)
        else:
            squares_on_device(chain.from_iterable(flats), out, scratch)

    def squares_of_chunks(self, flat: Tensor, out: Tensor, scratch: Tensor) -> None:
        """Sum on the device, in the current stream, by an order of our own."""
        chunk_squares_on_device(flat, out, scratch)

    def sum_of_chunks(self, squares: Tensor) -> float:
        """Add up on the host what was summed on the device, as that does it."""
        return float(tree_sum(squares))

    def available_bytes(self) -> int:
        """Bytes free on the device, or left of the limit."""
        free = free_bytes(self.device)
        return free if self.device_limit is None else min(free, self.device_limit - self.device_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that torch had allocated on the device."""
        return peak_bytes(self.device)

    def _finish(self) -> None:
        for stream in (*self._streams.values(), torch.accelerator.current_stream(self.device)):
            stream.synchronize()
        self._spans.resolve()
        self._spans.anchor()

    def _release(self) -> None:
        try:
            torch.accelerator.synchronize(self.device)
        finally:
            for arena in self._locked:
                arena.unlock()
            self._locked.clear()

    def _stream(self, lane: Lane) -> torch.Stream:
        stream = self._streams.get(lane)
        return torch.accelerator.current_stream(self.device) if stream is None else stream

    def _make_worker(self, lane: Lane) -> Worker:
        if lane in _HOST_LANES:
            return HostWorker(lane, self._failure, self._recorder, self._streams[lane], self._spans.marks)
        return StreamWorker(lane, self._failure, self._recorder, self._streams[lane], self._spans)

    def _submit(self, lane: Lane, function: Callable[[], object], work: float, label: object) -> None:
        if lane is not Lane.COMPUTE:
            super()._submit(lane, function, work, label)
            return
        start = self._start_span(lane)
        function()
        self._spans.add(lane, label, start, self._mark(lane), work)

    def _mark(self, lane: Lane) -> Mark:
        return self._spans.marks.record(self._stream(lane))

    def _start_span(self, lane: Lane) -> Any:
        return self._mark(lane) if lane is Lane.COMPUTE else super()._start_span(lane)

    def _end_span(self, lane: Lane, label: object, start: Any, event: Event | None, work: float) -> None:
        if lane is Lane.COMPUTE:
            end = self._mark(lane) if event is None else event.native
            self._spans.add(lane, label, start, end, work)
        else:
            super()._end_span(lane, label, start, event, work)

    def _set_now(self, event: Event) -> None:
        if event.lane is Lane.COMPUTE:  # in the calling thread: autograd has its own current stream
            event.native = self._mark(event.lane)
        super()._set_now(event)

    def _wait_now(self, event: Event, cause: Cause) -> None:
        start_s = time.perf_counter()
        assert event.launched is not None
        blocks = not event.launched.is_set()
        if blocks:
            event.launched.wait()  # before anything is read of the event: its lane fills it in
        if event.native is not None and cause.waiting is Lane.CALLER:
            until_done(event.native.event)
            blocks = True
        if blocks:
            self._recorder.waited(cause, start_s)
        if event.native is not None and cause.waiting is Lane.COMPUTE:
            self._stream(Lane.COMPUTE).wait_event(event.native.event)
        self._raise_failure()


@contextmanager
def _on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream, and its device, the calling thread's current ones."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
