"""What a step's report says, and the times that it is made of: when lanes worked, and what bounds a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import kind_of
from megatrain.stream.lanes import Span, Wait

Bound = Literal["copies", "compute", "optimizer", "drives"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step of training, as measured.

    A step's time is from its beginning (`forward_backward`, or the first forward) to the beginning of the
    next one, or to the first reading of `engine.last_step` after `opt.step()`, or to a forward without
    gradients, whichever comes first. With deferred updates the host updates in this time what the step
    before has left, as it does in the next step for this one: in a steady state that is one step's worth. An
    operation, and a wait, counts in the step in which it ends; what ends between two steps counts in the
    later one, but for an evaluation's.
    """

    fetches: int
    """Copies of streamed blocks to the device."""
    offloads: int
    """Copies of streamed blocks' gradients to the host."""
    fetch_bytes: int
    """To the device: weights of streamed and resident blocks, and gradients that go on adding up."""
    offload_bytes: int
    """To the host: gradients of streamed and resident blocks."""
    update_bytes: int
    """Host memory that the step's updates read and write, whenever they run."""
    saved_bytes: int
    """Activations to the host."""
    restored_bytes: int
    """Activations back to the device."""
    drive_read_bytes: int = 0
    """State and weights from the drives, asked for since the step before."""
    drive_write_bytes: int = 0
    """State to the drives, likewise; the commit of the step before is part of it."""
    gathered_bytes: int = 0
    """Weights that other ranks of the node have fetched and this one has got from them."""
    exchanged_bytes: int = 0
    """Sums of gradients that were sent to other ranks, for their shares."""
    spread_bytes: int = 0
    """New weights that were sent to other nodes."""
    swapped_bytes: int = 0
    """Given to the ranks that share out the same rows, and as many got from them."""
    allocator_retries: int = 0
    """How often torch gave back what it kept of the device's memory, to find some: it waits for the device
    then. More than none in most steps means that the device is too full."""
    unused_device_bytes: int = 0
    """What torch keeps of the device's memory and nobody uses, at the step's end: what is left over between
    tensors, and what the next step will use again."""
    seconds: float
    lane_seconds: Mapping[str, float]
    """How long each lane worked, by its name; waits do not count."""
    waits: Mapping[str, float]
    """Seconds for which a lane stood still, longest first: "compute<-fetch slot" is compute, for a fetch into
    a slot. Of the waits of a CUDA stream only those that held up the launching thread are known."""
    tokens: int
    """Tokens with a label: those over which the loss is averaged."""
    model_flops: float
    """Forward and backward of all tokens that are no padding, nothing counted twice."""
    hardware_flops: float
    """What was computed: padding and recomputation too. A recomputation counts as a whole forward, though
    torch ends it before the last product if nobody needs what that makes. What a compiled backward computes
    again within a budget is not counted."""
    matmul_peak: float | None
    """FLOP/s of a large matrix product on the device, as measured; None: it could not be."""
    bound: Bound
    """What is longest, and bounds the step even if all the rest overlaps: `copies` in one direction,
    `compute` (forward and backward), the `optimizer` with what cannot run beside it, or the `drives` in one
    direction, or as they read for the optimizer."""
    bound_s: float
    """How long that takes."""

    @property
    def model_flops_per_s(self) -> float:
        """Model FLOPs per second of the step."""
        return self.model_flops / self.seconds

    @property
    def hardware_flops_per_s(self) -> float:
        """Hardware FLOPs per second of the step."""
        return self.hardware_flops / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the measured matmul peak; None: no peak is known."""
        return None if self.matmul_peak is None else self.model_flops_per_s / self.matmul_peak

    @property
    def over_bound(self) -> float:
        """The step's seconds over those of its bound: 1 if all the rest overlaps."""
        return self.seconds / self.bound_s if self.bound_s else 1.0


class Work:
    """When each lane worked."""

    def __init__(self, spans: Sequence[Span], waits: Sequence[Wait]) -> None:
        """Take spans, and the waits inside those of the launching thread, which are no work."""
        self._spans = spans
        self._waits = [wait for wait in waits if wait.cause.waiting in (Lane.COMPUTE, Lane.CALLER)]
        found = {span.lane for span in spans}
        self.lanes = [lane for lane in Lane if lane in found]

    def busy_s(self, *lanes: Lane, start_s: float = float("-inf")) -> float:
        """Return how long at least one of `lanes` worked, after `start_s`."""
        spans = ((max(s.start_s, start_s), s.end_s) for s in self._spans if s.lane in lanes)
        waits = (
            (max(w.start_s, start_s), w.start_s + w.seconds) for w in self._waits if w.cause.waiting in lanes
        )
        waited = union(waits)
        return length(union([*spans, *waited])) - length(waited)

    def bound(self, schedule: str) -> tuple[Bound, float]:
        """Return what is longest, if all that may overlap does, and its seconds.

        Deferred updates run beside the forwards of the next step's first round, but not beside what follows
        these; immediate ones beside everything, serial ones beside nothing.
        """
        compute_s = self.busy_s(Lane.COMPUTE)
        host = [span for span in self._spans if span.lane is Lane.HOST]
        updates = [span for span in host if not kind_of(span.label).is_sum]
        host_s = length(union((span.start_s, span.end_s) for span in updates))  # sums run beside the backward
        backwards = [
            span.start_s
            for span in self._spans
            if span.lane is Lane.COMPUTE and kind_of(span.label).is_backward
        ]
        after_s = self.busy_s(Lane.COMPUTE, start_s=min(backwards)) if backwards else 0.0
        apart_s = {"deferred": after_s, "immediate": 0.0, "serial": compute_s}[schedule]
        read_s = self.busy_s(Lane.READ)
        copies_s = max(self.busy_s(Lane.FETCH, Lane.RESTORE), self.busy_s(Lane.OFFLOAD, Lane.SAVE))
        seconds: dict[Bound, float] = {
            "compute": compute_s,
            "copies": copies_s,
            "optimizer": host_s + apart_s if host_s else 0.0,
            "drives": max(
                self.busy_s(Lane.READ, Lane.PAGE, Lane.RECALL),
                self.busy_s(Lane.WRITE, Lane.STOW),
                read_s + apart_s if read_s else 0.0,
            ),
        }
        name = max(seconds, key=lambda key: seconds[key])
        return name, seconds[name]


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that are in at least one of `intervals`, as intervals that do not touch."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of intervals that do not overlap."""
    return sum(stop - start for start, stop in intervals)
