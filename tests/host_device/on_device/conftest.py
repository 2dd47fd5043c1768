"""These tests register a device, so they run in a process of their own, started by `test_host_device.py`.

There, everything that holds a streamed run against a resident one has the resident model on the device too.
"""

from __future__ import annotations

import os

IN_OWN_PROCESS = "MEGATRAIN_HOST_DEVICE"

collect_ignore_glob = [] if os.environ.get(IN_OWN_PROCESS) else ["test_*.py"]

if os.environ.get(IN_OWN_PROCESS):
    from collections.abc import Iterator
    from contextlib import contextmanager

    import pytest

    from megatrain.plan.program.kinds import Lane
    from megatrain.stream.lanes.accelerator import StreamWorker
    from tests.host_device.device import register
    from tests.host_device.on_device.resident import ResidentOnDevice
    from tests.stream import runs

    host = register()
    runs.Resident = ResidentOnDevice  # type: ignore[misc]

    COPIES = (Lane.FETCH, Lane.OFFLOAD, Lane.SAVE, Lane.RESTORE)

    @pytest.fixture(autouse=True)
    def _copies_allocate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
        """An operation of a lane that copies fails where it would allocate device memory."""
        context = StreamWorker._context

        @contextmanager
        def refusing(self: StreamWorker) -> Iterator[None]:
            with context(self):
                host.native.refuse_allocations(self.lane in COPIES)
                yield

        monkeypatch.setattr(StreamWorker, "_context", refusing)

    @pytest.fixture(autouse=True)
    def _as_it_was() -> Iterator[None]:
        """Streams that do not dawdle, and counts from zero."""
        host.native.delay(0, 0.0, 0.0, 0.0)
        host.native.take_counts()
        yield
        host.native.delay(0, 0.0, 0.0, 0.0)
