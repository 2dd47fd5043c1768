"""Where a thread waits for the test device: each call is noted with its place in the sources."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from megatrain.stream.lanes import accelerator, locked_ring
from tests.host_device.device import register

_NO_WAITS = ("fused attention", "fused attention backward")
"""What the device counts besides."""
_OURS = ("megatrain", "transformers")


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait of the launching thread for the device, or of autograd's."""

    what: str
    """The count of the test device."""
    place: str
    """The innermost frame of megatrain or transformers: file and function."""


@contextmanager
def watched() -> Iterator[list[Wait]]:
    """Yield the waits of threads that launch; those of lanes' own threads hold nobody up.

    Autograd's threads are torch's own, and Python knows them as dummies.
    """
    native, found = register().native, []

    def note(what: str) -> None:
        thread = threading.current_thread()
        launches = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
        if launches and what not in _NO_WAITS:
            found.append(Wait(what=what, place=_place()))

    def until_done(event: Any, held: Any = locked_ring.until_done) -> None:
        note("event")
        held(event)

    native.listen(note)
    try:
        with (
            mock.patch.object(locked_ring, "until_done", until_done),
            mock.patch.object(accelerator, "until_done", until_done),
        ):
            yield found
    finally:
        native.listen(None)


def _place() -> str:
    for frame in reversed(traceback.extract_stack()):
        parts = Path(frame.filename).parts
        for package in _OURS:
            if package in parts:
                name = "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
                return f"{name} {frame.name}"
    return "autograd"
