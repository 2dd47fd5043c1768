"""All ordering of the project: lanes, events, waits, and the backends that carry them out.

An operation names the buffers that it reads and writes. From these names alone `Lanes` derives who waits for
whom: a reader waits for the last writer, a writer for the last writer and all readers since, unless they are
in its own lane, where order is given. Nothing outside this folder records or waits.

Backends: `InlineLanes` (CPU: every operation runs at once), `CheckedLanes` (inline, plus vector clocks that
find a missing wait whatever the timing, and NaN in freed buffers), `EmulatedLanes` (a thread per lane, with
rates, delays and a memory budget), `AcceleratorLanes` (a thread and a stream per lane). On the last two the
launching thread blocks for nothing but what compute, or it itself, needs at once, and every such wait is in
the record with its cause.
"""

from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes.accelerator import AcceleratorLanes
from megatrain.stream.lanes.base import Cause, Event, InlineLanes, Lanes, OrderingError
from megatrain.stream.lanes.checked import CheckedLanes
from megatrain.stream.lanes.emulated import EmulatedLanes, EmulatedMachine
from megatrain.stream.lanes.records import Record, Span, Wait

__all__ = [
    "AcceleratorLanes",
    "Cause",
    "CheckedLanes",
    "EmulatedLanes",
    "EmulatedMachine",
    "Event",
    "InlineLanes",
    "Lane",
    "Lanes",
    "OrderingError",
    "Record",
    "Span",
    "Wait",
]
