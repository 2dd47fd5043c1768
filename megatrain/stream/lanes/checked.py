"""Inline lanes that prove their own order.

Source: vector clocks (Fidge 1988; Mattern 1989), as in happens-before race detectors.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes.base import Cause, Event, InlineLanes, OrderingError


class CheckedLanes(InlineLanes):
    """Inline, and every access is proved to happen after what it depends on, by vector clocks.

    Lanes count their operations. An event carries its lane's clock; a wait merges it into the waiting lane's
    clock. An access is safe when the clock of its lane has reached every conflicting access before it.
    """

    are_ordered = are_proved = True

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
