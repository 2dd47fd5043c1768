"""Collectives of accelerators are ordered by streams, and no thread of the host waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.distributed.ranks import Ranks
from tests.host_device.device import TYPE, register
from tests.host_device.on_device.nccl import stand_in


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Lend the only one of its ranks."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with Ranks(store, 60.0) as alone:
        alone.neighbours(1)
        yield alone
    dist.destroy_process_group()


def gathered(ranks: Ranks, tensor: Tensor) -> Tensor:
    ranks.gather_pieces(tensor)
    return tensor


def shared(ranks: Ranks, tensor: Tensor) -> Tensor:
    ranks.gather_shares([[tensor[:3], tensor[3:]]])
    return tensor


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Let the current stream go no further until an event is set."""
    gate = threading.Event()
    register().native.launch(gate.wait)
    try:
        yield gate
    finally:
        gate.set()


CALLS: dict[str, Callable[[Ranks, Tensor], Tensor]] = {
    "swap": lambda ranks, tensor: ranks.swap(tensor),
    "exchange": lambda ranks, tensor: ranks.exchange(tensor, [8], "near", torch.empty_like(tensor))[0],
    "gather_pieces": gathered,
    "gather_shares": shared,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_device_that_is_behind_ends_no_communicator_and_holds_up_no_thread(
    ranks: Ranks, call: Callable[[Ranks, Tensor], Tensor]
) -> None:
    """The device has work of an hour to do before; the order is known all the same."""
    with stand_in(late_s=3600.0), held_up() as gate:
        sent = torch.arange(8, device=TYPE) * 2
        found = call(ranks, sent) + 1  # returns: nothing of it is done
        is_there = torch.Event(device=TYPE)
        is_there.record(torch.accelerator.current_stream())
        assert not is_there.query()
        gate.set()
        assert found.cpu().tolist() == [1, 3, 5, 7, 9, 11, 13, 15]


def test_what_a_device_waits_for_is_watched_until_it_is_there(ranks: Ranks) -> None:
    works: Any = ranks.watch.__dict__["_waits"].__dict__["_of_devices"]
    with stand_in(), held_up() as gate:
        ranks.swap(torch.ones(2, device=TYPE))
        assert [(wait.lane, is_done()) for wait, is_done in works][-1] == ("sequence", False)
        gate.set()
        until_s = time.monotonic() + 30
        while works and time.monotonic() < until_s:  # the watch looks every second
            time.sleep(0.05)
        assert not works
