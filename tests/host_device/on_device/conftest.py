"""These tests register a device, so they run in a process of their own, started by `test_host_device.py`.

There, everything that holds a streamed run against a resident one has the resident model on the device too.
"""

from __future__ import annotations

import os

IN_OWN_PROCESS = "MEGATRAIN_HOST_DEVICE"

collect_ignore_glob = [] if os.environ.get(IN_OWN_PROCESS) else ["test_*.py"]

if os.environ.get(IN_OWN_PROCESS):
    from collections.abc import Iterator

    import pytest

    from tests.host_device.device import register
    from tests.host_device.on_device.refused import allocations_refused
    from tests.host_device.on_device.resident import ResidentOnDevice
    from tests.stream import runs

    host = register()
    runs.Resident = ResidentOnDevice  # type: ignore[misc]

    @pytest.fixture(autouse=True)
    def _copies_allocate_nothing() -> Iterator[None]:
        with allocations_refused():
            yield

    @pytest.fixture(autouse=True)
    def _as_it_was() -> Iterator[None]:
        """Streams that do not dawdle, and counts from zero."""
        host.native.delay(0, 0.0, 0.0, 0.0)
        host.native.take_counts()
        yield
        host.native.delay(0, 0.0, 0.0, 0.0)
