"""Lanes that may not allocate memory of the test device: an operation of theirs that does fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes.accelerator import StreamWorker
from tests.host_device.device import register

COPIES = (Lane.FETCH, Lane.OFFLOAD, Lane.SAVE, Lane.RESTORE, Lane.GATHER, Lane.EXCHANGE, Lane.SPREAD)


@contextmanager
def allocations_refused() -> Iterator[None]:
    """Refuse allocations in lanes that copy, and in those in which ranks exchange."""
    native, context = register().native, StreamWorker._context

    @contextmanager
    def refusing(self: StreamWorker) -> Iterator[None]:
        with context(self):
            native.refuse_allocations(self.lane in COPIES)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamWorker, "_context", refusing)
        yield
