"""Lanes of an accelerator that does not exist: real threads and data, at the rates of another machine."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.plan.program import Buffer, Lane
from megatrain.stream.lanes.base import Event
from megatrain.stream.lanes.records import Cause, Recorder
from megatrain.stream.lanes.threads import Failure, ThreadedLanes, Worker

_SHARERS = {Lane.RESTORE: Lane.FETCH, Lane.SAVE: Lane.OFFLOAD}
"""Lanes that use the link of another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedMachine:
    """Rates of an accelerator that does not exist. Zero means: no delay."""

    compute_flops_per_s: float = 0.0
    """Rate of operations enqueued in COMPUTE, which then has a thread. What the launching thread computes
    itself takes as long as it takes."""
    h2d_bytes_per_s: float = 0.0
    """Rate of the link to the device, which FETCH and RESTORE share."""
    d2h_bytes_per_s: float = 0.0
    """Rate of the link to the host, which OFFLOAD and SAVE share."""
    host_bytes_per_s: float = 0.0
    """Rate of host memory under the operations of HOST."""
    device_bytes: int | None = None
    """Memory budget of the device for slots, gradients and resident blocks; None: unlimited."""
    jitter_s: float = 2e-4
    """Every operation of a thread starts after a random delay of up to this."""
    seed: int = 0
    catch_up_s: float = 5e-3
    """How late a thread may wake and still keep to its timetable; one that is later starts a new one."""

    @classmethod
    def from_rates(cls, rates: Mapping[str, float], scale: float = 1.0) -> EmulatedMachine:
        """Read a machine from measured rates, without jitter, and patient with a busy computer.

        Args:
            rates: `compute_flops_per_s`, `h2d_bytes_per_s`, `d2h_bytes_per_s`, `host_bytes_per_s`, and
                `device_bytes`; other keys are ignored.
            scale: Factor for every rate: with 0.5 everything takes twice as long. Memory stays as it is.

        Raises:
            ConfigError: A key is missing.
        """
        try:
            return cls(
                compute_flops_per_s=rates["compute_flops_per_s"] * scale,
                h2d_bytes_per_s=rates["h2d_bytes_per_s"] * scale,
                d2h_bytes_per_s=rates["d2h_bytes_per_s"] * scale,
                host_bytes_per_s=rates["host_bytes_per_s"] * scale,
                device_bytes=int(rates["device_bytes"]),
                jitter_s=0.0,
                catch_up_s=5e-2,
            )
        except KeyError as missing:
            raise ConfigError(f"the rates of the machine lack {missing.args[0]}; add it") from None

    def rate(self, lane: Lane) -> float:
        """Return the work per second of a lane; 0: no delay."""
        rates = {
            Lane.COMPUTE: self.compute_flops_per_s,
            Lane.FETCH: self.h2d_bytes_per_s,
            Lane.OFFLOAD: self.d2h_bytes_per_s,
            Lane.HOST: self.host_bytes_per_s,
        }
        return rates[_SHARERS.get(lane, lane)]


class Link:
    """Something that serves one operation at a time, at a rate."""

    def __init__(self, rate: float) -> None:
        """Serve `rate` units of work per second; 0: no delay."""
        self._rate = rate
        self._lock = threading.Lock()
        self._free_s = 0.0

    def reserve(self, ready_s: float, work: float) -> tuple[float, float]:
        """Return when an operation that is ready at `ready_s` begins, and the seconds that it takes."""
        seconds = work / self._rate if self._rate else 0.0
        if not seconds:
            return ready_s, 0.0
        with self._lock:
            begin_s = max(ready_s, self._free_s)
            self._free_s = begin_s + seconds
        return begin_s, seconds


class PacedWorker(Worker):
    """A lane that keeps to a timetable.

    An operation begins when what it waits for is done by the timetable and its lane and link are free by the
    timetable, so that a thread that sleeps too long does not delay what comes after: errors do not add up.
    """

    def __init__(
        self, lane: Lane, failure: Failure, recorder: Recorder, link: Link, machine: EmulatedMachine
    ) -> None:
        """Take turns on `link`, with delays of this lane's own chance."""
        super().__init__(lane, failure, recorder)
        self._link = link
        self._jitter_s = machine.jitter_s
        self._catch_up_s = machine.catch_up_s
        self._chance = random.Random(machine.seed * len(Lane) + list(Lane).index(lane))
        self._ready_s = 0.0
        self._free_s = 0.0

    def _wait(self, event: Event, cause: Cause) -> None:
        self._until_launched(event, cause)
        self._ready_s = max(self._ready_s, event.done_s)

    def _run(self, function: Callable[[], object], work: float, label: str, enqueued_s: float) -> None:
        timely_s = time.perf_counter() - self._catch_up_s
        ready_s = max(enqueued_s, self._ready_s, self._free_s, timely_s)
        if self._jitter_s:
            ready_s += self._chance.random() * self._jitter_s
        begin_s, seconds = self._link.reserve(ready_s, work)
        _sleep_until(begin_s)
        start_s = time.perf_counter()
        try:
            function()
        finally:
            self._free_s = begin_s + max(seconds, time.perf_counter() - start_s)
            _sleep_until(self._free_s)
        self._recorder.span(self.lane, label, begin_s, self._free_s, work)

    def _set(self, event: Event) -> None:
        event.done_s = max(self._free_s, self._ready_s)
        super()._set(event)


class EmulatedLanes(ThreadedLanes):
    """Every lane but the launching thread's is a thread, with a rate and jitter.

    COMPUTE is the launching thread, or a thread too if the machine has a rate for it; `begin` and `end` are
    always for what the launching thread does itself.
    """

    def __init__(self, machine: EmulatedMachine | None = None) -> None:
        """Emulate `machine`; by default one without rates, but with jitter."""
        self.machine = machine or EmulatedMachine()
        super().__init__(torch.device("cpu"), self.machine.device_bytes)
        self._links: dict[Lane, Link] = {}
        self._is_direct = False

    def begin(
        self, lane: Lane, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = (), label: str = ""
    ) -> None:
        """Wait for the buffers, and for what COMPUTE's own thread has to do: the order within a lane."""
        compute = self._workers.get(lane)
        if compute is not None:
            start_s = time.perf_counter()
            compute.mark().wait()
            self._recorder.waited(Cause(lane, lane, "everything"), start_s)
        self._is_direct = True
        try:
            super().begin(lane, reads=reads, writes=writes, label=label)
        finally:
            self._is_direct = False

    def end(self, lane: Lane, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> None:
        """Mark the end of the work that `begin` announced."""
        self._is_direct = True
        try:
            super().end(lane, reads=reads, writes=writes)
        finally:
            self._is_direct = False

    def freed(self, flat: Tensor) -> None:
        """Fill a freed buffer with NaN, so that a late reader shows."""
        flat.fill_(0xFF)

    def _is_threaded(self, lane: Lane) -> bool:
        if lane is Lane.COMPUTE:
            return self.machine.compute_flops_per_s > 0 and not self._is_direct
        return lane is not Lane.CALLER

    def _make_worker(self, lane: Lane) -> Worker:
        owner = _SHARERS.get(lane, lane)
        link = self._links.setdefault(owner, Link(self.machine.rate(owner)))
        return PacedWorker(lane, self._failure, self._recorder, link, self.machine)


def _sleep_until(time_s: float) -> None:
    while (left_s := time_s - time.perf_counter()) > 0:
        time.sleep(left_s)
