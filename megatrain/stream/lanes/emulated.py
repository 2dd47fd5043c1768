"""Lanes of an accelerator that does not exist: real threads and data, at the rates of another machine."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.store.arena import Arena
from megatrain.stream.lanes.base import Event
from megatrain.stream.lanes.emulated_timing import LaunchClock, Link, PacedWorker
from megatrain.stream.lanes.records import Cause
from megatrain.stream.lanes.threads import ThreadedLanes, Worker

_SHARERS = {
    Lane.RESTORE: Lane.FETCH,
    Lane.SAVE: Lane.OFFLOAD,
    Lane.PAGE: Lane.READ,
    Lane.RECALL: Lane.READ,
    Lane.STOW: Lane.WRITE,
}
"""Lanes that use the link of another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedMachine:
    """Rates of an accelerator that does not exist. Zero means: no delay."""

    RATES: ClassVar = ("compute_flops_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "host_bytes_per_s")
    """Names of the rates."""

    compute_flops_per_s: float = 0.0
    """Rate of operations enqueued in COMPUTE, which then has a thread, and of what the launching thread
    computes itself, where `end` is told the FLOPs of it."""
    h2d_bytes_per_s: float = 0.0
    """Rate of the link to the device, which FETCH and RESTORE share."""
    d2h_bytes_per_s: float = 0.0
    """Rate of the link to the host, which OFFLOAD and SAVE share."""
    host_bytes_per_s: float = 0.0
    """Rate of host memory under the operations of HOST."""
    nvme_read_bytes_per_s: float = 0.0
    """Rate of the drives, all together, under READ, PAGE and RECALL."""
    nvme_write_bytes_per_s: float = 0.0
    """Rate of the drives, all together, under WRITE and STOW."""
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
                `device_bytes`; `nvme_read_bytes_per_s` and `nvme_write_bytes_per_s` if it has drives; other
                keys are ignored.
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
                nvme_read_bytes_per_s=rates.get("nvme_read_bytes_per_s", 0.0) * scale,
                nvme_write_bytes_per_s=rates.get("nvme_write_bytes_per_s", 0.0) * scale,
                device_bytes=int(rates["device_bytes"]),
                jitter_s=0.0,
                catch_up_s=5e-2,
            )
        except KeyError as missing:
            raise ConfigError(f"the rates of the machine lack {missing.args[0]}; add it") from None

    def with_rates(self, rates: Mapping[str, float]) -> EmulatedMachine:
        """Return the machine with other rates, by the names of its fields.

        Raises:
            ConfigError: An unknown name, or a rate that is not positive.
        """
        for name, rate in rates.items():
            if name not in self.RATES:
                raise ConfigError(f"an emulated machine has no {name}; use one of {', '.join(self.RATES)}")
            if not 0.0 < rate < float("inf"):
                raise ConfigError(f"{name} of the emulated machine is {rate}; use a positive number")
        changes: dict[str, Any] = dict(rates)
        return replace(self, **changes)

    def rate(self, lane: Lane) -> float:
        """Return the work per second of a lane; 0: no delay."""
        rates = {
            Lane.COMPUTE: self.compute_flops_per_s,
            Lane.FETCH: self.h2d_bytes_per_s,
            Lane.OFFLOAD: self.d2h_bytes_per_s,
            Lane.HOST: self.host_bytes_per_s,
            Lane.READ: self.nvme_read_bytes_per_s,
            Lane.WRITE: self.nvme_write_bytes_per_s,
            Lane.GATHER: 0.0,
            Lane.EXCHANGE: 0.0,  # how fast other ranks are is not emulated
            Lane.SPREAD: 0.0,
        }
        return rates[_SHARERS.get(lane, lane)]

    def chance(self, lane: Lane) -> random.Random:
        """Return what draws the delays of a lane."""
        return random.Random(self.seed * len(Lane) + list(Lane).index(lane))


class EmulatedLanes(ThreadedLanes):
    """Every lane but the launching thread's is a thread, with a rate and jitter.

    COMPUTE is the launching thread, or a thread too if the machine has a rate for it; `begin` and `end` are
    always for what the launching thread does itself: with a rate, what `end` is told the FLOPs of takes as
    long as they take.
    """

    updates_with_kernels = True  # a GPU's operations take seconds here that no rate knows of

    def __init__(self, machine: EmulatedMachine | None = None) -> None:
        """Emulate `machine`; by default one without rates, but with jitter."""
        self.machine = machine or EmulatedMachine()
        super().__init__(torch.device("cpu"), self.machine.device_bytes)
        self._links: dict[Lane, Link] = {}
        self._locked: list[Arena] = []
        self._is_direct = False
        self._clock = LaunchClock(
            self.machine.chance(Lane.COMPUTE), self.machine.jitter_s, self.machine.catch_up_s
        )
        self._spent: tuple[float, float] | None = None
        """When, by the timetable, the span that is about to end began and ended."""

    def set_rates(self, **rates: float) -> None:
        """Change rates, by the names of `EmulatedMachine`'s fields; from the next operation on.

        Any thread may call it.

        Raises:
            ConfigError: An unknown name, or a rate that is not positive.
        """
        self.machine = self.machine.with_rates(rates)
        for lane, link in list(self._links.items()):
            link.set_rate(self.machine.rate(lane))

    @property
    def matmul_flops_per_s(self) -> float | None:
        """Rate of the emulated accelerator; None: the launching thread computes as fast as it does."""
        return self.machine.compute_flops_per_s or None

    def drain(self) -> None:
        """Block until every lane has done what was enqueued so far."""
        try:
            super().drain()
        finally:
            self._clock.wait_until(time.perf_counter())

    def begin(
        self, lane: Lane, *, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = (), label: object = ""
    ) -> None:
        """Wait for the buffers, and for what COMPUTE's own thread has to do: the order within a lane."""
        compute = self._workers.get(lane)
        if compute is not None:
            start_s = time.perf_counter()
            compute.mark().wait()
            self._clock.wait_until(time.perf_counter())
            self._recorder.waited(Cause(lane, lane, "everything"), start_s)
        self._is_direct = True
        try:
            super().begin(lane, reads=reads, writes=writes, label=label)
        finally:
            self._is_direct = False

    def end(
        self,
        lane: Lane,
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        work: float = 0.0,
    ) -> None:
        """Mark the end of the work that `begin` announced; it takes as long as its FLOPs do."""
        self._is_direct = True
        try:
            self._spend(lane, work)
            super().end(lane, reads=reads, writes=writes, work=work)
        finally:
            self._is_direct = False

    def end_span(self, lane: Lane, *, work: float = 0.0) -> None:
        """Mark the end of what `begin_span` announced; it takes as long as its FLOPs do."""
        self._spend(lane, work)
        super().end_span(lane, work=work)

    def lock(self, arena: Arena | None) -> None:
        """Take all pages, as page-locking does."""
        if arena is not None and not any(held is arena for held in self._locked):
            self._locked.append(arena)
            arena.touch()

    def unlock(self, arena: Arena | None) -> None:
        """Forget about it; its pages stay."""
        self._locked = [held for held in self._locked if held is not arena]

    def freed(self, flat: Tensor) -> None:
        """Fill a freed buffer with NaN, so that a late reader shows."""
        flat.fill_(0xFF)

    def _is_threaded(self, lane: Lane) -> bool:
        if lane is Lane.COMPUTE:
            return self.machine.compute_flops_per_s > 0 and not self._is_direct
        return lane is not Lane.CALLER

    def _make_worker(self, lane: Lane) -> Worker:
        machine = self.machine
        return PacedWorker(
            lane,
            self._failure,
            self._recorder,
            self._link(lane),
            machine.chance(lane),
            machine.jitter_s,
            machine.catch_up_s,
        )

    def _link(self, lane: Lane) -> Link:
        owner = _SHARERS.get(lane, lane)
        return self._links.setdefault(owner, Link(self.machine.rate(owner)))

    def _spend(self, lane: Lane, work: float) -> None:
        if work and lane is Lane.COMPUTE and self.machine.compute_flops_per_s:
            self._spent = self._clock.work(self._link(lane), work)

    def _end_span(self, lane: Lane, label: object, start: Any, event: Event | None, work: float) -> None:
        spent, self._spent = self._spent, None
        if spent is None:
            super()._end_span(lane, label, start, event, work)
        else:
            self._recorder.span(lane, label, *spent, work)

    def _launch_s(self) -> float:
        return self._clock.now()

    def _set_now(self, event: Event) -> None:
        event.done_s = self._clock.now()

    def _wait_now(self, event: Event, cause: Cause) -> None:
        super()._wait_now(event, cause)
        self._clock.wait_until(event.done_s)
