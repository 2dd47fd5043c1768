"""The part of a rate that is left where lanes share a link or host memory, on average over a step.

Copies both ways share a link (`both_share`). Copies, AdamW and drives share the host's memory: what they ask
for together beyond its rate slows all of them alike. How much of a step the others are busy is taken from
their work over the least time that the step can take, so that no timetable has to be made twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.plan.cost.rates import Rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The demand of a step for what its lanes share."""

    up_bytes: float
    """Copied to the device."""
    down_bytes: float
    update_bytes: float
    """Bytes of host memory that updates read and write."""
    sum_bytes: float = 0.0
    """Bytes of host memory that adding gradients up there reads and writes."""
    drive_bytes: float = 0.0
    """Read from drives and written there: each passes host memory once."""
    least_s: float
    """Seconds below which the step cannot be."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of the rates that are left."""

    up: float = 1.0
    down: float = 1.0
    update: float = 1.0

    @classmethod
    def of(cls, rates: Rates, demand: Demand) -> Shares:
        """Say what is left on a machine; where the host computes, everything runs in turn and has it all."""
        spec = rates.spec
        if not spec.has_accelerator or demand.least_s <= 0:
            return cls()

        def busy(seconds: float) -> float:
            return min(1.0, seconds / demand.least_s)

        up_busy = busy(rates.fetch_s(demand.up_bytes))
        down_busy = busy(rates.offload_s(demand.down_bytes))
        update_busy = busy(rates.update_s(demand.update_bytes))
        beside = (
            demand.up_bytes + demand.down_bytes + demand.drive_bytes + demand.sum_bytes
        ) / demand.least_s
        wanted = rates.update_bytes_per_s * rates.update_traffic + beside
        memory = min(1.0, spec.host_bytes_per_s / wanted)
        lost = 1.0 - spec.both_share
        slowed = 1.0 - (1.0 - memory) * update_busy
        return cls(
            up=(1.0 - lost * down_busy) * slowed,
            down=(1.0 - lost * up_busy) * slowed,
            update=memory,
        )


def memory_s(rates: Rates, demand: Demand) -> float:
    """Return the seconds in which the host's memory takes all of a step's traffic, and no less."""
    copied = demand.up_bytes + demand.down_bytes + demand.drive_bytes
    updated = demand.update_bytes * rates.update_traffic
    return (copied + updated + demand.sum_bytes) / rates.spec.host_bytes_per_s
