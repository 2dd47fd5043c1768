"""Follows an engine from step to step, and says of each where its time went.

Everything comes from what the lanes and the executor count anyway; the device is never waited for. What a
step adds is a few sums: its spans are looked at when somebody reads the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.config.policies import Policy
from megatrain.errors import ConfigError
from megatrain.hardware import measure_matmul_peak
from megatrain.hardware.accelerators import allocator_counts
from megatrain.model.shares import targets_of
from megatrain.plan.program.kinds import Lane
from megatrain.store.precision import Precision
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.micro_batches import MicroBatchSize
from megatrain.stream.lanes import Record
from megatrain.stream.report import StepReport, Work

_OF_HEAD = ("chunked_tokens", "rerun_tokens")
"""Counts of the head's tokens, which are none of bytes."""


class _Arranged(NamedTuple):
    """What of the engine's arrangement a step's report asks for."""

    forwards: list[int]
    """How often each layer runs again as a whole."""
    parts: dict[int, Policy]
    """The policies of layers of which a part runs again."""
    updates: str


@dataclass(slots=True)
class _Step:
    """A step, as it goes along."""

    began_s: float
    before: dict[str, int]
    """What had been moved before, since attach."""
    records: list[Record]
    targets: list[int | Tensor]
    is_counted: bool
    """All targets were known when the step began."""
    batches: list[MicroBatchSize] = field(default_factory=list)
    arranged: _Arranged | None = None
    """Set when the engine goes on in another way."""
    moved: dict[str, int] | None = None
    """Set by `opt.step()`."""
    ended_s: float = 0.0

    def end(self, record: Record) -> None:
        self.records.append(record)
        self.ended_s = time.perf_counter()


class StepMeter:
    """Follows an engine from step to step; the engine tells it what begins and ends."""

    def __init__(self, arrangement: Arrangement) -> None:
        """Follow the engine with these parts."""
        self._arrangement = arrangement
        self._open: _Step | None = None
        self._last: _Step | StepReport | None = None
        self._was_elsewhere = True
        """What the lanes did since the last step was no training."""
        self.on_record: Callable[[Record], object] | None = None
        """Called with everything that the lanes did, whenever it is taken from them."""

    # -- what happens ----------------------------------------------------------------------------------------

    def begin(self, targets: int | None = None) -> None:
        """Begin a step of so many targets, if that is known, and end the one before."""
        records: list[Record] = []
        if self._is_stepped:
            self._end()
        else:
            left = self.take()
            # after an evaluation, or a step that was dropped, updates are all that belongs to training
            is_mixed = self._open is not None or self._was_elsewhere
            kept = {Lane.HOST, Lane.READ, Lane.WRITE} if is_mixed else set(Lane) - {Lane.CALLER}
            records.append(left.of(kept))
        self._was_elsewhere = False
        counts: list[int | Tensor] = [] if targets is None else [targets]
        is_counted = targets is not None
        self._open = _Step(time.perf_counter(), self._moved(), records, counts, is_counted)

    def forward(self, named: Mapping[str, Any], batch: MicroBatchSize | None) -> None:
        """Take note of a micro-batch, given by name; the first one after a step begins the next."""
        if self._open is None or self._is_stepped:
            self.begin()
        assert self._open is not None
        if batch is None:
            return
        self._open.batches.append(batch)
        if not self._open.is_counted:
            count = targets_of(named)
            self._open.targets.append(batch.present if count is None else count)

    def stepped(self) -> None:
        """Take note that the optimizer has taken the step: it is complete."""
        if self._open is not None:
            before = self._open.before
            self._open.moved = {name: now - before[name] for name, now in self._moved().items()}
            self._open.moved["unused_device_bytes"] = self._allocator()[1]

    def drop(self) -> None:
        """Forget a step whose gradients were dropped."""
        if self._open is not None and not self._is_stepped:
            self._open = None
            self._was_elsewhere = True

    def pause(self) -> None:
        """Take note that something else than training begins."""
        if self._is_stepped:
            self._end()
        self._was_elsewhere = True

    def settle(self) -> None:
        """Note how the engine is arranged for the newest step: the next one is another way."""
        if self._is_stepped:
            self._end()
        if isinstance(self._last, _Step) and self._last.arranged is None:
            self._last.arranged = self._arranged()

    def _arranged(self) -> _Arranged:
        rounds = self._arrangement.rounds
        return _Arranged(rounds.forwards_again, rounds.parts_again, self._arrangement.choice.updates)

    def take(self) -> Record:
        """Take what the lanes have recorded, for the step and for whoever listens."""
        record = self._arrangement.lanes.take_record()
        if self.on_record is not None:
            self.on_record(record)
        return record

    @property
    def _is_stepped(self) -> bool:
        return self._open is not None and self._open.moved is not None

    def _end(self) -> None:
        assert self._open is not None
        self._open.end(self.take())
        self._last, self._open = self._open, None

    def _moved(self) -> dict[str, int]:
        """Return what has been moved since attach, by the names of `StepReport`; tokens in chunks too."""
        offloaded = self._arrangement.offloaded
        recalled, stowed = offloaded.drive_bytes
        moved: dict[str, int] = dict(vars(self._arrangement.counts))
        moved["drive_read_bytes"] += recalled
        moved["drive_write_bytes"] += stowed
        moved["allocator_retries"] = self._allocator()[0]
        return {**moved, "saved_bytes": offloaded.saved_bytes, "restored_bytes": offloaded.restored_bytes}

    def _allocator(self) -> tuple[int, int]:
        device = self._arrangement.lanes.device
        return (0, 0) if device.type == "cpu" else allocator_counts(device)

    # -- the report ------------------------------------------------------------------------------------------

    def report(self) -> StepReport:
        """Return the report of the newest complete step.

        Raises:
            ConfigError: There is none.
        """
        if self._is_stepped:
            self._end()
        if self._last is None:
            raise ConfigError("engine.last_step: no step is complete; call opt.step() before")
        if isinstance(self._last, _Step):
            self._last = self._make(self._last)
        return self._last

    def _make(self, step: _Step) -> StepReport:
        arrangement, moved = self._arrangement, step.moved
        assert moved is not None
        # A stream's spans are times of the device and its waits those of the launching thread: no difference.
        spans = [span for record in step.records for span in record.spans]
        waited = [wait for record in step.records for wait in record.waits]
        work = Work(spans, [] if arrangement.lanes.device.type != "cpu" else waited)
        arranged = step.arranged or self._arranged()
        bound, bound_s = work.bound(arranged.updates)
        waits: dict[str, float] = {}
        for wait in sorted(waited, key=lambda wait: wait.seconds, reverse=True):
            name = f"{wait.cause.waiting.value}<-{wait.cause.owner.value} {wait.cause.buffer}"
            waits[name] = waits.get(name, 0.0) + wait.seconds
        model_flops, hardware_flops = self._count(step.batches, arranged, moved["rerun_tokens"])
        return StepReport(
            **{name: value for name, value in moved.items() if name not in _OF_HEAD},
            seconds=step.ended_s - step.began_s,
            lane_seconds={lane.value: work.busy_s(lane) for lane in work.lanes},
            waits=dict(sorted(waits.items(), key=lambda item: item[1], reverse=True)),
            tokens=sum(map(int, step.targets)),
            model_flops=model_flops,
            hardware_flops=hardware_flops,
            matmul_peak=self.matmul_peak,
            bound=bound,
            bound_s=bound_s,
        )

    @property
    def matmul_peak(self) -> float | None:
        """FLOP/s of a large matrix product in the working dtype, measured once; None: the device is full.

        Of an emulated accelerator with a rate, that rate.
        """
        lanes = self._arrangement.lanes
        if lanes.matmul_flops_per_s is not None:
            return lanes.matmul_flops_per_s
        is_bf16 = self._arrangement.host.precision is Precision.BF16
        try:
            return measure_matmul_peak(lanes.device, torch.bfloat16 if is_bf16 else torch.float32)
        except torch.OutOfMemoryError:
            return None

    def _count(
        self, batches: Iterable[MicroBatchSize], arranged: _Arranged, rerun_tokens: int
    ) -> tuple[float, float]:
        flops = self._arrangement.flops
        model = hardware = 0.0
        for batch in batches:
            per_token = flops.model_flops(batch.row_tokens)
            model += int(batch.present) * per_token
            again = flops.recomputed_flops(batch.row_tokens, arranged.forwards, arranged.parts)
            hardware += batch.positions * (per_token + again)
        return model, hardware + rerun_tokens * flops.head_flops
