"""The engine's measurements of a step, as columns of the step's row."""

from __future__ import annotations

from typing import Any

from megatrain.stream.report import StepReport
from megatrain.train.records.metrics import AMONG_RANKS

_NUM_WAITS = 3
"""The number of a step's longest waits that its row names."""


def measured(report: StepReport, *, model_flops: float, num_ranks: int) -> dict[str, Any]:
    """Return the columns; bytes and times are those of this rank.

    Args:
        report: The report of this rank.
        model_flops: The FLOPs of all ranks' tokens without padding, which the engine cannot always tell.
        num_ranks: The number of ranks that train together.
    """
    peak = report.matmul_peak
    return {
        "mfu": None if peak is None else model_flops / report.seconds / (num_ranks * peak),
        "bound": report.bound,
        "over_bound": report.over_bound,
        "fetch_bytes": report.fetch_bytes,
        "offload_bytes": report.offload_bytes,
        "allocator_retries": report.allocator_retries,
        "unused_device_bytes": report.unused_device_bytes,
        **({name: getattr(report, name) for name in AMONG_RANKS} if num_ranks > 1 else {}),
        "waits": dict(list(report.waits.items())[:_NUM_WAITS]),
        "lane_seconds": {name: round(busy_s, 6) for name, busy_s in report.lane_seconds.items()},
    }
