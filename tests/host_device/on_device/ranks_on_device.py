"""A rank that trains on the test device, as `tests.distributed.processes` runs it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tests.distributed.bits.test_given_up import Full
from tests.distributed.training import train
from tests.host_device.device import TYPE, register
from tests.host_device.on_device.nccl import stand_in
from tests.host_device.on_device.refused import allocations_refused


def train_on_device(ranks: Any, *, nccl: bool = False, **settings: Any) -> dict[str, Any]:
    """Train as `train`, with streams that dawdle, and with the stand-in for NCCL if that is wished for.

    Lanes that copy or exchange allocate nothing on the device.
    """
    register().native.delay(3, 0.2, 3e-4, 1e-4)
    with allocations_refused(), stand_in(late_s=3600.0) if nccl else nullcontext():
        return train(ranks, device=TYPE, **settings)


def train_on_a_full_device(
    ranks: Any, *, fails: int, after: float, **settings: Any
) -> tuple[int, int, dict[str, Any]]:
    """Train so, where the device of a rank has no room in the second step, after a part of its visits.

    Returns:
        How often this rank's device had no room, how often a step was given up, and what `train` returns.
    """
    full = Full(ranks.rank == fails, after)
    told = train_on_device(ranks, passes=full, **settings)
    return full.num_failed, len(full.errors), told
