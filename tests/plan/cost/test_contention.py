"""What lanes leave each other of a link and of the host's memory, by sums that can be done by hand."""

from __future__ import annotations

import pytest

from megatrain.plan.cost.contention import Demand, Shares, memory_s
from megatrain.plan.cost.rates import Rates
from tests.plan.anatomies import machine

LINK, UPDATES = 50e9, 8e9
"""Bytes per second each way; parameters per second, of 26 bytes: 208 GB/s."""


def rates(*, both_share: float = 1.0, host_rate: float = 1e15, device: str = "imagined") -> Rates:
    spec = machine(link=LINK, update_rate=UPDATES, both_share=both_share, host_rate=host_rate, device=device)
    return Rates(spec, "bf16")


def demand(*, up: float = 0.0, down: float = 0.0, update: float = 0.0, drives: float = 0.0) -> Demand:
    """Return a step of a second: seconds of each lane in, its bytes out."""
    return Demand(
        up_bytes=up * LINK,
        down_bytes=down * LINK,
        update_bytes=update * UPDATES * 26,
        drive_bytes=drives,
        least_s=1.0,
    )


def test_alone_a_lane_has_its_rate() -> None:
    slow = rates(both_share=0.5, host_rate=UPDATES * 26)
    assert Shares.of(slow, demand(up=1.0)).up == 1.0
    assert Shares.of(slow, demand(down=1.0)).down == 1.0
    assert Shares.of(slow, demand(update=1.0)).update == 1.0


def test_a_fetch_is_slowed_as_long_as_something_goes_home() -> None:
    shares = Shares.of(rates(both_share=0.8), demand(up=1.0, down=0.25))
    assert shares.up == pytest.approx(1 - 0.2 * 0.25)
    assert shares.down == pytest.approx(0.8), "the way up is always busy"


def test_copies_and_updates_share_host_memory() -> None:
    # updates want 208 GB/s, copies 40 GB/s on average: of 200 GB/s all have the same part
    shares = Shares.of(rates(host_rate=200e9), demand(up=0.5, down=0.3, update=0.5))
    part = 200 / 248
    assert shares.update == pytest.approx(part)
    assert shares.up == pytest.approx(1 - (1 - part) * 0.5), "updates are there for half of the step"


def test_drives_take_host_memory_too() -> None:
    without = Shares.of(rates(host_rate=208e9), demand(update=1.0))
    shares = Shares.of(rates(host_rate=208e9), demand(update=1.0, drives=52e9))
    assert (without.update, shares.update) == (1.0, pytest.approx(0.8))


def test_where_the_host_computes_nothing_is_shared() -> None:
    busy = demand(up=1.0, down=1.0, update=1.0)
    for device in ("cpu", "emulated"):
        assert Shares.of(rates(both_share=0.5, host_rate=1e9, device=device), busy) == Shares()


def test_host_memory_is_a_bound() -> None:
    busy = demand(up=1.0, down=0.5, update=0.5, drives=25e9)
    assert memory_s(rates(host_rate=100e9), busy) == pytest.approx((50 + 25 + 104 + 25) / 100)
