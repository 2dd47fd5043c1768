"""Events in words, and settings without what is secret in them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit


def event_text(row: Mapping[str, Any]) -> str:
    """Return a row of `events.jsonl` as a sentence without its time."""
    details = [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in ("event", "time", "step", "reason", "text", "prompt") and value is not None
    ]
    why = [str(row[name]) for name in ("reason", "text") if row.get(name)]
    more = "; ".join([*why, ", ".join(details)] if details else why)
    return f"{row.get('event')} at step {row.get('step')}" + (f": {more}" if more else "")


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they may be shown to others: of an address only the host."""
    log = config.get("log")
    if not isinstance(log, Mapping) or not log.get("webhook"):
        return dict(config)
    return {**config, "log": {**log, "webhook": f"{host_of(str(log['webhook']))}/..."}}


def host_of(address: str) -> str:
    """Return the part of an address that is no secret."""
    with suppress(ValueError):  # it was written by hand
        parts = urlsplit(address)
        if parts.hostname is not None:
            return f"{parts.scheme}://{parts.hostname}"
    return "an address"
