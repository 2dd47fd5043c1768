"""Alerts tell a webhook of a run's events on their own thread, so that the run neither waits nor fails."""

from __future__ import annotations

import json
import logging
import queue
import threading
import urllib.request
from collections.abc import Collection, Mapping
from typing import Any

from megatrain.train.records.shareable import host_of
from megatrain.train.report.texts import event_text

_log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""The timeout of one message; the end of a run waits this long for the last ones."""


class Alerts:
    """Sends the events that were asked for; use as a context manager."""

    def __init__(self, address: str | None, events: Collection[str], *, run: str) -> None:
        """Store the address and the events.

        Args:
            address: The address of the webhook; None sends nothing.
            events: The names of the events to send.
            run: The name of the run in the messages.
        """
        self._address = address
        self._events = frozenset(events)
        self._run = run
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def tell(self, row: Mapping[str, Any]) -> None:
        """Send a row of `events.jsonl`, if its event was asked for; return at once."""
        if self._address is None or row["event"] not in self._events:
            return
        text = f"{self._run}: {event_text(row)}"
        # Slack and most others read `text`, Discord reads `content`
        self._waiting.put(json.dumps({"text": text, "content": text, "run": self._run, **row}).encode())
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="webhook", daemon=True)
            self._thread.start()

    def _send_all(self) -> None:
        assert self._address is not None
        while (message := self._waiting.get()) is not None:
            try:
                request = urllib.request.Request(
                    self._address, data=message, headers={"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                    pass
            except Exception as error:  # whatever it is, it must not end the run
                if not self._has_warned:
                    host = host_of(self._address)
                    _log.warning("log.webhook: %s was not told (%s); the run goes on", host, error)
                self._has_warned = True

    def __enter__(self) -> Alerts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(timeout=TIMEOUT_S)
