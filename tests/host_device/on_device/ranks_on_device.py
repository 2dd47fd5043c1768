"""A rank that trains on the test device, as `tests.distributed.processes` runs it."""

from __future__ import annotations

from typing import Any

from tests.distributed.training import train
from tests.host_device.device import TYPE, register


def train_on_device(ranks: Any, **settings: Any) -> dict[str, Any]:
    """Train as `train`, with streams that dawdle."""
    register().native.delay(3, 0.2, 3e-4, 1e-4)
    return train(ranks, device=TYPE, **settings)
