"""A stand-in for NCCL: collectives that the test device does in its own time, and that abort as NCCL's.

A work has a stream of its group, which waits for the current one. `wait()` lets the current stream wait for
the work, and returns. `wait(timeout)` blocks; where the work is not done so long after it was queued, it
aborts the communicator, and raises an error. Gloo moves the bytes, between copies on the host.

Source: `WorkNCCL::wait` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.distributed.ranks import Ranks
from tests.host_device.device import TYPE, register

_COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all_single", "broadcast")


class Work:
    """One collective, which is queued when this is made."""

    def __init__(self, collective: Callable[..., Any], stream: torch.Stream, late_s: float) -> None:
        """Queue it.

        Args:
            collective: Is given where tensors are to be found on the host, by those on the device.
            stream: Of its group.
            late_s: For how long it has been queued already, as far as `wait` knows.
        """
        self._queued_s = time.monotonic() - late_s
        stream.wait_event(_recorded(torch.accelerator.current_stream()))
        self._is_aborted = False
        with stream:
            collective()
            self._end = _recorded(stream)

    def is_completed(self) -> bool:
        return self._is_aborted or bool(self._end.query())

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._end)
        if timeout is not None:
            while not self.is_completed():
                self._is_aborted = time.monotonic() - self._queued_s >= timeout.total_seconds()
                time.sleep(0.001)
        if self._is_aborted:
            raise dist.DistBackendError(
                "the work timed out in blocking wait, and the communicator is aborted"
            )
        return True


@contextmanager
def stand_in(late_s: float = 0.0) -> Iterator[None]:
    """Let ranks send tensors of the test device from device to device.

    Args:
        late_s: How long works are taken to be queued already, when somebody begins to wait for them.
    """
    native = register().native
    streams: dict[Any, torch.Stream] = {}

    def standing_for(real: Callable[..., Any]) -> Callable[..., Any]:
        def collective(found: Any, *more: Any, group: Any = None, async_op: bool = False) -> Any:
            *others, group = more if group is None else (*more, group)
            first = found if isinstance(found, Tensor) else found[0]
            if first.device.type != TYPE:
                return real(found, *others, group=group, async_op=async_op)

            def launch() -> None:
                given = [_on_host(one) for one in (found, *others)]
                native.launch(lambda: real(*given, group=group) and None)
                pairs = [(found, given[0])] if first is found else zip(found, given[0], strict=True)
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)

            return Work(launch, streams.setdefault(group, torch.Stream(device=TYPE)), late_s)

        return collective

    with ExitStack() as patches:
        patches.enter_context(patch.object(Ranks, "_within_reach", lambda ranks, tensor, lane: tensor))
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                patches.enter_context(patch.object(dist, name, standing_for(getattr(dist, name))))
        yield


def _on_host(given: Any) -> Any:
    """Return where tensors of the device will be on the host, once the current stream has copied them."""
    if isinstance(given, list):
        return [*map(_on_host, given)]
    if not isinstance(given, Tensor):
        return given
    return torch.empty(given.shape, dtype=given.dtype, pin_memory=True).copy_(given, non_blocking=True)


def _recorded(stream: torch.Stream) -> torch.Event:
    event = torch.Event(device=stream.device)
    event.record(stream)
    return event
