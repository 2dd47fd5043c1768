"""Reader of the first step of a `trace.json` that `megatrain trace` has written into the run directory."""

from __future__ import annotations

import json
from pathlib import Path

from megatrain.train.planning.timeline import Span, thinned

_FIRST = 1
"""The process number of the first rank."""
_MOST_BYTES = 200 * 2**20
"""The largest size of a file that is read for one picture."""


def trace_spans(path: Path) -> list[Span]:
    """Return the spans of the first rank's lanes in the first traced step; none without a readable trace."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return []
        events = [e for e in json.loads(path.read_bytes())["traceEvents"] if e["pid"] == _FIRST]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        begins = sorted(e["ts"] for e in events if e.get("ph") == "i")
        first, end = begins[0], begins[1] if len(begins) > 1 else float("inf")
        spans = [
            (
                str(lanes[e["tid"]]),
                str(e["name"]).split()[0],
                (e["ts"] - first) / 1e6,
                (e["ts"] + e["dur"] - first) / 1e6,
            )
            for e in events
            if e.get("ph") == "X" and first <= e["ts"] < end and e.get("cat") != "wait"
        ]
        return thinned(spans)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return []
