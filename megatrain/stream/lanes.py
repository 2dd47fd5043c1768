"""All ordering of the project: lanes, events, waits, and the backends that carry them out.

An operation names the buffers that it reads and writes. From these names alone `Lanes` derives who waits for
whom: a reader waits for the last writer, a writer for the last writer and all readers since, unless they are
in its own lane, where order is given. Nothing else in the project records or waits.

Backends: `InlineLanes` (CPU: every operation runs at once), `CheckedLanes` (inline, plus vector clocks that
find a missing wait whatever the timing, and NaN in freed buffers), `EmulatedLanes` (copy lanes are threads
with bandwidths, delays and a memory budget), `CudaLanes` (streams and events).

Source of the checker: vector clocks (Fidge 1988; Mattern 1989), as in happens-before race detectors.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.errors import CapacityError
from megatrain.optim.adamw import sum_of_squares
from megatrain.optim.pool import default_pool
from megatrain.plan.program import Buffer, Lane
from megatrain.store.arena import Arena

_log = logging.getLogger(__name__)


class OrderingError(AssertionError):
    """A buffer was used without a wait that makes it safe, or an event waited for before it was recorded."""


class Cause(NamedTuple):
    """Why a lane waits: for what another lane does with a buffer of this kind."""

    waiting: Lane
    owner: Lane
    buffer: str


@dataclass(slots=True)
class Event:
    """A point in a lane's order."""

    lane: Lane
    native: Any = None
    clock: dict[Lane, int] = field(default_factory=dict)
    is_recorded: bool = False


class Lanes(ABC):
    """The interface: enqueue work with the buffers it touches; waits follow."""

    def __init__(self, device: torch.device, device_limit: int | None = None) -> None:
        """Work on `device`, and allocate at most `device_limit` bytes there."""
        self.device = device
        self.device_limit = device_limit
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self._writer: dict[Buffer, Event] = {}
        self._readers: dict[Buffer, dict[Lane, Event]] = {}

    def enqueue(
        self,
        lane: Lane,
        function: Callable[[], object],
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        nbytes: int = 0,
    ) -> None:
        """Run `function` in `lane`, after everything that the buffers require. `nbytes` cross the link."""
        reads, writes = tuple(reads), tuple(writes)
        self._wait_for(lane, reads, writes)
        self._access(lane, reads, writes)
        self._submit(lane, function, nbytes)
        self._note(lane, reads, writes)

    def begin(self, lane: Lane, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> None:
        """Wait for the buffers before work that the caller launches itself; `end` with the same buffers."""
        reads, writes = tuple(reads), tuple(writes)
        self._wait_for(lane, reads, writes)
        self._access(lane, reads, writes)

    def end(self, lane: Lane, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> None:
        """Mark the end of the work that `begin` announced."""
        reads, writes = tuple(reads), tuple(writes)
        self._access(lane, reads, writes)
        self._note(lane, reads, writes)

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
        """Make host memory ready for copies that do not hold up the launching thread; `close` undoes it."""

    def free(self, buffers: Iterable[Tensor]) -> None:
        """Take buffers from `allocate` out of the account; the caller drops them."""
        self.device_bytes -= sum(buffer.numel() for buffer in buffers)

    def sum_of_squares(self, flats: Iterable[Tensor], out: Tensor) -> None:
        """Write the sum of squares of device tensors into `out`, a 0-dim float64 host or device tensor."""
        pool = default_pool()
        out.fill_(sum(sum_of_squares(pool, flat) for flat in flats))

    def available_bytes(self) -> int | None:
        """Bytes that may still be allocated on the device; None: unlimited."""
        return None if self.device_limit is None else self.device_limit - self.device_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use on the device so far: ours, and on CUDA everything that torch allocated."""
        return self.peak_device_bytes

    def freed(self, flat: Tensor) -> None:  # noqa: B027 (most backends have nothing to do)
        """Take note that nobody may read a device buffer any more."""

    def close(self) -> None:  # noqa: B027 (most backends have nothing to do)
        """Finish all work and end the lanes."""

    def _wait_for(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        for buffer in reads + writes:
            event = self._writer.get(buffer)
            if event is not None and event.lane != lane:
                self._wait(lane, event, Cause(lane, event.lane, buffer[0]))
        for buffer in writes:
            for owner, event in self._readers.get(buffer, {}).items():
                if owner != lane:
                    self._wait(lane, event, Cause(lane, owner, buffer[0]))

    def _note(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        event = self._record(lane)
        for buffer in writes:
            self._writer[buffer] = event
            self._readers.pop(buffer, None)
        for buffer in reads:
            self._readers.setdefault(buffer, {})[lane] = event

    def _access(  # noqa: B027 (only `CheckedLanes` checks)
        self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]
    ) -> None:
        """Check an access."""

    @abstractmethod
    def _submit(self, lane: Lane, function: Callable[[], object], nbytes: int) -> None: ...

    @abstractmethod
    def _record(self, lane: Lane) -> Event: ...

    @abstractmethod
    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None: ...


class InlineLanes(Lanes):
    """The CPU as its own accelerator: every operation has run when `enqueue` returns."""

    def __init__(self, device_limit: int | None = None) -> None:
        """Keep device buffers in host memory, at most `device_limit` bytes of them."""
        super().__init__(torch.device("cpu"), device_limit)

    def _submit(self, lane: Lane, function: Callable[[], object], nbytes: int) -> None:
        function()

    def _record(self, lane: Lane) -> Event:
        return Event(lane, is_recorded=True)

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        if not event.is_recorded:
            raise OrderingError(f"{cause} waits for an event that is not recorded")


class CheckedLanes(InlineLanes):
    """Inline, and every access is proved to happen after what it depends on, by vector clocks.

    Lanes count their operations. An event carries its lane's clock; a wait merges it into the waiting lane's
    clock. An access is safe when the clock of its lane has reached every conflicting access before it.
    """

    def __init__(self, device_limit: int | None = None) -> None:
        """Start all clocks at zero."""
        super().__init__(device_limit)
        self._clocks: dict[Lane, dict[Lane, int]] = {lane: dict.fromkeys(Lane, 0) for lane in Lane}
        self._last_write: dict[Buffer, tuple[Lane, int]] = {}
        self._last_reads: dict[Buffer, dict[Lane, int]] = {}

    def freed(self, flat: Tensor) -> None:
        """Fill a freed buffer with NaN (0xFF is a NaN in bf16 and fp32), so that a late reader shows."""
        flat.fill_(0xFF)

    def _access(self, lane: Lane, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        clock = self._clocks[lane]
        clock[lane] += 1
        for buffer in reads + writes:
            if buffer in self._last_write:
                self._require(lane, buffer, *self._last_write[buffer], "written")
        for buffer in writes:
            for owner, tick in self._last_reads.pop(buffer, {}).items():
                self._require(lane, buffer, owner, tick, "read")
            self._last_write[buffer] = (lane, clock[lane])
        for buffer in reads:
            self._last_reads.setdefault(buffer, {})[lane] = clock[lane]

    def _require(self, lane: Lane, buffer: Buffer, owner: Lane, tick: int, verb: str) -> None:
        if self._clocks[lane][owner] < tick:
            raise OrderingError(
                f"lane {lane.value} uses {buffer[0]} {buffer[1]} without waiting until lane {owner.value} "
                f"has {verb} it"
            )

    def _record(self, lane: Lane) -> Event:
        return Event(lane, clock=dict(self._clocks[lane]), is_recorded=True)

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        super()._wait(lane, event, cause)
        clock = self._clocks[lane]
        for owner, tick in event.clock.items():
            clock[owner] = max(clock[owner], tick)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedMachine:
    """Rates of an accelerator that does not exist. Zero means: no delay."""

    h2d_bytes_per_s: float = 0.0
    d2h_bytes_per_s: float = 0.0
    device_bytes: int | None = None
    """Memory budget of the device for slots, gradients and resident blocks; None: unlimited."""
    jitter_s: float = 2e-4
    """Every copy starts after a random delay of up to this."""
    seed: int = 0


class EmulatedLanes(Lanes):
    """Copies run in threads of their own, with bandwidth and jitter; compute runs in the launching thread."""

    def __init__(self, machine: EmulatedMachine | None = None) -> None:
        """Start one thread for each copy lane."""
        self.machine = machine or EmulatedMachine()
        super().__init__(torch.device("cpu"), self.machine.device_bytes)
        self._failure: BaseException | None = None
        self._queues: dict[Lane, queue.SimpleQueue[Callable[[], object] | None]] = {}
        self._threads = []
        for index, lane in enumerate((Lane.FETCH, Lane.OFFLOAD)):
            self._queues[lane] = queue.SimpleQueue()
            chance = random.Random(self.machine.seed * 2 + index)
            thread = threading.Thread(
                target=self._serve, args=(self._queues[lane], chance), name=f"lane-{lane.value}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Let the lanes finish, and end their threads."""
        for lane in self._queues.values():
            lane.put(None)
        for thread in self._threads:
            thread.join()
        self._raise_failure()

    def freed(self, flat: Tensor) -> None:
        """Fill a freed buffer with NaN, so that a late reader shows."""
        flat.fill_(0xFF)

    def _serve(self, tasks: queue.SimpleQueue[Callable[[], object] | None], chance: random.Random) -> None:
        while (task := tasks.get()) is not None:
            if self.machine.jitter_s:
                time.sleep(chance.random() * self.machine.jitter_s)
            try:
                task()
            except BaseException as error:  # carried to the launching thread, which raises it
                self._failure = error

    def _submit(self, lane: Lane, function: Callable[[], object], nbytes: int) -> None:
        self._raise_failure()
        if lane not in self._queues:
            function()
            return
        rate = self.machine.h2d_bytes_per_s if lane is Lane.FETCH else self.machine.d2h_bytes_per_s
        seconds = nbytes / rate if rate else 0.0

        def run() -> None:
            start = time.monotonic()
            function()
            time.sleep(max(0.0, seconds - (time.monotonic() - start)))

        self._queues[lane].put(run)

    def _record(self, lane: Lane) -> Event:
        event = Event(lane, native=threading.Event(), is_recorded=True)
        if lane in self._queues:
            self._queues[lane].put(event.native.set)
        else:
            event.native.set()
        return event

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        if not event.is_recorded:
            raise OrderingError(f"{cause} waits for an event that is not recorded")
        if lane in self._queues:
            self._queues[lane].put(event.native.wait)
        else:
            event.native.wait()
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


class CudaLanes(Lanes):
    """Streams and events of one CUDA device. The host lane is the launching thread."""

    def __init__(self, device: torch.device, device_limit: int | None = None) -> None:
        """Create one stream for each copy lane; compute runs in the stream that is current."""
        super().__init__(device, device_limit)
        self._streams = {Lane.FETCH: torch.cuda.Stream(device), Lane.OFFLOAD: torch.cuda.Stream(device)}
        self._locked: list[Arena] = []
        torch.cuda.reset_peak_memory_stats(device)

    def allocate(self, nbytes: int) -> Tensor:
        """Return (nbytes,) uint8 zeros on the device, which every stream may use at once."""
        buffer = super().allocate(nbytes)
        # The zeros are written in the current stream, which no operation declares: a first fetch would race.
        torch.cuda.current_stream(self.device).synchronize()
        return buffer

    def lock(self, arena: Arena | None) -> None:
        """Page-lock host memory. Copies from other memory are slower, and hold up the launching thread."""
        if arena is None or any(held is arena for held in self._locked):
            return
        self._locked.append(arena)  # a refused one too: it is asked for once, and has nothing to unlock
        if arena.lock():
            return
        with contextlib.suppress(RuntimeError):
            # The refused call stays the driver's last error, which the next kernel would raise as its own.
            torch.zeros(1, device=self.device)
        _log.warning(
            "%.1f GiB of host memory could not be page-locked: its copies will not overlap with compute",
            arena.nbytes / (1 << 30),
        )

    def sum_of_squares(self, flats: Iterable[Tensor], out: Tensor) -> None:
        """Sum on the device, in the current stream, without a wait of the host."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for flat in flats:
            if flat.numel():
                total += torch.linalg.vector_norm(flat, dtype=torch.float32).double().square()
        out.copy_(total, non_blocking=True)

    def available_bytes(self) -> int:
        """Bytes free on the device, or left of the limit."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free if self.device_limit is None else min(free, self.device_limit - self.device_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that torch had allocated on the device."""
        return int(torch.cuda.max_memory_allocated(self.device))

    def close(self) -> None:
        """Finish all work of the device, and unlock host memory."""
        torch.cuda.synchronize(self.device)
        for arena in self._locked:
            arena.unlock()
        self._locked.clear()

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams.get(lane) or torch.cuda.current_stream(self.device)

    def _submit(self, lane: Lane, function: Callable[[], object], nbytes: int) -> None:
        if lane is Lane.HOST:
            function()
            return
        with torch.cuda.stream(self._stream(lane)):
            function()

    def _record(self, lane: Lane) -> Event:
        event = Event(lane, is_recorded=True)
        if lane is not Lane.HOST:  # what the host lane did is done: it runs in the launching thread
            event.native = torch.cuda.Event()
            event.native.record(self._stream(lane))
        return event

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        if not event.is_recorded:
            raise OrderingError(f"{cause} waits for an event that is not recorded")
        if event.native is None:
            return
        if lane is Lane.HOST:
            event.native.synchronize()
        else:
            self._stream(lane).wait_event(event.native)
