"""Lanes that are threads: order, rates, failures and records."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes import (
    Cause,
    CheckedLanes,
    EmulatedLanes,
    EmulatedMachine,
    InlineLanes,
    Lanes,
    Span,
)
from tests.clocks import OwnClocks, watch_events
from tests.stream.lanes.lane_programs import run_program

THREADS = [Lane.FETCH, Lane.OFFLOAD, Lane.SAVE, Lane.RESTORE, Lane.HOST]
STEADY = EmulatedMachine(jitter_s=0.0)
RATES = {
    "compute_flops_per_s": 1e12,
    "h2d_bytes_per_s": 1e9,
    "d2h_bytes_per_s": 2e9,
    "host_bytes_per_s": 4e9,
    "device_bytes": 1000,
}


def nothing() -> None:
    """Do nothing."""


@contextmanager
def emulated(machine: EmulatedMachine = STEADY) -> Iterator[EmulatedLanes]:
    """Close the lanes after a test."""
    lanes = EmulatedLanes(machine)
    try:
        yield lanes
    finally:
        lanes.close()


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> OwnClocks:
    """Let only sleeping take time."""
    return OwnClocks(monkeypatch)


def spans_of(lanes: Lanes, lane: Lane) -> list[Span]:
    """Finish, and return the spans of one lane."""
    lanes.drain()
    return [span for span in lanes.take_record().spans if span.lane is lane]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_seeds", [40, pytest.param(200, marks=pytest.mark.parity)])
@pytest.mark.parametrize("compute_flops_per_s", [0.0, 1e12])
def test_jitter_seeds_give_what_inline_lanes_give(compute_flops_per_s: float, num_seeds: int) -> None:
    for seed in range(num_seeds):
        machine = EmulatedMachine(seed=seed, jitter_s=1e-4, compute_flops_per_s=compute_flops_per_s)
        with emulated(machine) as lanes:
            assert torch.equal(run_program(lanes, seed), run_program(InlineLanes(), seed)), f"seed {seed}"


def test_the_order_of_random_programs_is_proved() -> None:
    for seed in range(50):
        assert torch.equal(run_program(CheckedLanes(), seed), run_program(InlineLanes(), seed))


@pytest.mark.parametrize(
    ("lane", "rate"),
    [
        (Lane.FETCH, "h2d_bytes_per_s"),
        (Lane.RESTORE, "h2d_bytes_per_s"),
        (Lane.OFFLOAD, "d2h_bytes_per_s"),
        (Lane.SAVE, "d2h_bytes_per_s"),
        (Lane.HOST, "host_bytes_per_s"),
        (Lane.COMPUTE, "compute_flops_per_s"),
    ],
)
def test_an_operation_takes_its_work_over_the_rate(lane: Lane, rate: str, clocks: OwnClocks) -> None:
    rates: dict[str, Any] = {rate: 1e6}
    start_s, began_s = clocks.now(), []
    with emulated(EmulatedMachine(jitter_s=0.0, **rates)) as lanes:
        for _ in range(5):
            lanes.enqueue(lane, lambda: began_s.append(clocks.now()), work=4e3)
        spans = spans_of(lanes, lane)
    times = [start_s + 0.004 * number for number in range(6)]
    assert began_s == pytest.approx(times[:5])  # by the thread's own clock, which only its sleep moves
    assert [span.start_s for span in spans] == pytest.approx(times[:5])
    assert [span.end_s for span in spans] == pytest.approx(times[1:])


@pytest.mark.parametrize(("first", "second"), [(Lane.FETCH, Lane.RESTORE), (Lane.OFFLOAD, Lane.SAVE)])
def test_two_lanes_of_one_link_share_its_rate(first: Lane, second: Lane, clocks: OwnClocks) -> None:
    """Together 2 x 10 operations of 2 ms take 40 ms."""
    start_s = clocks.now()
    machine = EmulatedMachine(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, jitter_s=0.0)
    with emulated(machine) as lanes:
        for _ in range(10):
            lanes.enqueue(first, nothing, work=2e6)
            lanes.enqueue(second, nothing, work=2e6)
        lanes.drain()
        spans = lanes.take_record().spans
    times = [start_s + 0.002 * number for number in range(21)]
    assert [span.start_s for span in spans] == pytest.approx(times[:20])
    assert [span.end_s for span in spans] == pytest.approx(times[1:])


@pytest.mark.usefixtures("clocks")
def test_the_two_directions_of_the_link_are_used_at_once() -> None:
    with emulated(EmulatedMachine(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, jitter_s=0.0)) as lanes:
        lanes.enqueue(Lane.FETCH, nothing, work=5e7)
        lanes.enqueue(Lane.OFFLOAD, nothing, work=5e7)
        lanes.drain()
        a, b = lanes.take_record().spans
    assert (a.start_s, a.end_s) == (b.start_s, b.end_s)
    assert a.end_s - a.start_s == pytest.approx(0.05)


def test_late_wake_ups_do_not_add_up(clocks: OwnClocks) -> None:
    """The timetable has no gaps: each operation begins at the very time at which the one before ended."""
    clocks.late_s = 0.004  # of the 5 ms that a thread may be late
    with emulated(EmulatedMachine(h2d_bytes_per_s=1e6, compute_flops_per_s=1e6, jitter_s=0.0)) as lanes:
        for index in range(40):
            lanes.enqueue(Lane.FETCH, nothing, writes=[("slot", index)], work=2e3)
            lanes.enqueue(Lane.COMPUTE, nothing, reads=[("slot", index)], work=2e3)
        lanes.drain()
        spans = lanes.take_record().spans
    fetches = [span for span in spans if span.lane is Lane.FETCH]
    computes = [span for span in spans if span.lane is Lane.COMPUTE]
    late_s = [b.start_s - a.end_s for a, b in pairwise(fetches)]
    late_s += [compute.start_s - fetch.end_s for fetch, compute in zip(fetches, computes, strict=True)]
    assert late_s == pytest.approx([0.0] * 79, abs=1e-9)


def test_a_thread_that_is_later_than_it_may_be_starts_a_new_timetable(clocks: OwnClocks) -> None:
    clocks.late_s = 0.02
    with emulated(EmulatedMachine(h2d_bytes_per_s=1e6, jitter_s=0.0, catch_up_s=0.005)) as lanes:
        for _ in range(4):
            lanes.enqueue(Lane.FETCH, nothing, work=2e3)
        spans = spans_of(lanes, Lane.FETCH)
    # the first wakes 20 ms late; the second begins 5 ms before that, and from there it is on time again
    assert [b.start_s - a.end_s for a, b in pairwise(spans)] == pytest.approx([0.015, 0.0, 0.0])


@pytest.mark.parametrize("lane", THREADS)
@pytest.mark.parametrize("raised_by", ["enqueue", "begin", "wait", "drain", "close"])
def test_a_failure_of_each_lane_reaches_the_caller(lane: Lane, raised_by: str) -> None:
    gate = threading.Event()
    ran: list[str] = []

    def fail(text: str) -> None:
        gate.wait()
        raise OSError(text)

    lanes = EmulatedLanes(STEADY)
    lanes.enqueue(lane, partial(fail, "the first failure"), writes=[("slot", 0)])
    lanes.enqueue(lane, partial(fail, "the second failure"))
    lanes.enqueue(lane, lambda: ran.append("after the failure"))
    gate.set()
    lanes._worker(lane).mark().wait()
    calls: dict[str, Callable[[], None]] = {
        "enqueue": lambda: lanes.enqueue(Lane.FETCH, lambda: ran.append("enqueued")),
        "begin": lambda: lanes.begin(Lane.COMPUTE),
        "wait": lambda: lanes.begin(Lane.CALLER, reads=[("slot", 0)]),
        "drain": lanes.drain,
        "close": lanes.close,
    }
    with pytest.raises(OSError, match="the first failure"):
        calls[raised_by]()
    lanes.close()  # the lanes are sound again, and know of no other failure
    assert ran == []


def test_nothing_enqueued_before_a_failure_is_known_runs_after_it() -> None:
    """An update must not use a gradient that did not arrive."""
    gate = threading.Event()
    ran: list[str] = []

    def fail() -> None:
        gate.wait()
        raise OSError("no gradient")

    with emulated() as lanes:
        lanes.enqueue(Lane.OFFLOAD, fail, writes=[("gradient", 0)])
        lanes.enqueue(
            Lane.HOST, lambda: ran.append("update"), reads=[("gradient", 0)], writes=[("working", 0)]
        )
        lanes.enqueue(Lane.FETCH, lambda: ran.append("fetch"), reads=[("working", 0)])
        gate.set()
        with pytest.raises(OSError, match="no gradient"):
            lanes.begin(Lane.CALLER, reads=[("working", 0)])
        lanes.enqueue(Lane.FETCH, lambda: ran.append("next step"), reads=[("working", 0)])
        lanes.drain()
    assert ran == ["next step"]


def test_drain_waits_for_every_lane() -> None:
    done: list[Lane] = []
    with emulated(EmulatedMachine(jitter_s=5e-3)) as lanes:
        for lane in THREADS:
            lanes.enqueue(lane, partial(done.append, lane))
        lanes.drain()
        assert set(done) == set(THREADS)


def test_the_launching_thread_does_not_wait_for_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update gates its own fetch, in the fetch lane, and nothing else."""
    events, now_s = watch_events(monkeypatch)
    gate = threading.Event()
    order: list[str] = []

    def update() -> None:
        gate.wait()
        order.append("update")

    with emulated() as lanes:
        lanes.enqueue(Lane.HOST, update, writes=[("working", 0)])
        lanes.enqueue(Lane.FETCH, lambda: order.append("fetch"), reads=[("working", 0)], writes=[("slot", 0)])
        lanes.begin(Lane.COMPUTE, reads=[("slot", 1)])
        order.append("compute")
        lanes.end(Lane.COMPUTE, reads=[("slot", 1)])
        events.until_one_waits()  # the fetch, for the update
        assert lanes.take_record().waits == []
        now_s[0] += 1.0
        gate.set()
        lanes.begin(Lane.COMPUTE, reads=[("slot", 0)])
        lanes.end(Lane.COMPUTE, reads=[("slot", 0)])
        waits = lanes.take_record().waits
    assert order == ["compute", "update", "fetch"]
    fetch = next(wait for wait in waits if wait.cause == Cause(Lane.FETCH, Lane.HOST, "working"))
    assert fetch.seconds == 1.0


@pytest.mark.parametrize("waiting", [Lane.COMPUTE, Lane.CALLER])
def test_a_wait_of_the_launching_thread_names_its_cause(
    waiting: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, now_s = watch_events(monkeypatch)

    def save() -> None:
        events.until_one_waits()
        now_s[0] += 1.0

    with emulated() as lanes:
        lanes.enqueue(Lane.SAVE, save, writes=[("saved", 0)])
        lanes.begin(waiting, reads=[("saved", 0)])
        lanes.end(waiting, reads=[("saved", 0)])
        (wait,) = lanes.take_record().waits
        assert wait.cause == Cause(waiting, Lane.SAVE, "saved")
        assert wait.seconds == 1.0


@pytest.mark.parametrize("make", [InlineLanes, CheckedLanes, EmulatedLanes])
def test_every_operation_has_one_span_with_its_label(make: Callable[[], Lanes]) -> None:
    lanes = make()
    run_program(lanes, seed=7, num_operations=60)
    spans = lanes.take_record().spans
    assert sorted(span.label for span in spans) == sorted(f"op{number}" for number in range(60))
    for lane in Lane:
        own = [span for span in spans if span.lane is lane]
        assert [int(span.label[2:]) for span in own] == sorted(int(span.label[2:]) for span in own)
        assert all(span.start_s <= span.end_s for span in own)
        assert all(a.end_s <= b.start_s for a, b in pairwise(own))
    assert lanes.take_record().spans == []
    lanes.close()


def test_a_record_that_nobody_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.stream.lanes.records.MAX_KEPT", 10)
    lanes = InlineLanes()
    for number in range(25):
        lanes.enqueue(Lane.HOST, nothing, label=str(number))
    assert [span.label for span in lanes.take_record().spans] == [str(number) for number in range(15, 25)]


def test_lane_functions_run_without_grad() -> None:
    """Grad mode belongs to a thread: a new one has it on."""
    modes: list[bool] = []
    with emulated() as lanes:
        for lane in THREADS:
            lanes.enqueue(lane, lambda: modes.append(torch.is_grad_enabled()))
        lanes.drain()
    assert modes == [False] * len(THREADS)


def test_a_lane_lets_go_of_what_an_operation_used() -> None:
    tensor = torch.zeros(8)
    held = weakref.ref(tensor)
    with emulated() as lanes:
        lanes.enqueue(Lane.OFFLOAD, tensor.zero_, writes=[("gradient", 0)])
        del tensor
        lanes.drain()
        while held() is not None:
            time.sleep(1e-3)  # the mark that ended the drain is set a moment before the thread is idle


def threads_of(lanes: EmulatedLanes) -> list[threading.Thread]:
    """Use every lane, and return the threads."""
    for lane in THREADS:
        lanes.enqueue(lane, nothing)
    lanes.drain()
    return [worker._thread for worker in lanes._workers.values()]


def test_closed_lanes_have_no_threads() -> None:
    lanes = EmulatedLanes(STEADY)
    threads = threads_of(lanes)
    assert len(threads) == len(THREADS)
    lanes.close()
    lanes.close()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(AssertionError, match="the lanes are closed"):
        lanes.enqueue(Lane.FETCH, nothing)


def test_dropped_lanes_end_their_threads() -> None:
    """Threads that held on to their lanes would keep a dropped engine's memory for ever."""
    lanes = EmulatedLanes(STEADY)
    threads = threads_of(lanes)
    del lanes
    gc.collect()
    for thread in threads:
        thread.join()


def test_the_host_lane_is_not_for_the_launching_thread() -> None:
    with pytest.raises(AssertionError, match="not for host"):
        InlineLanes().begin(Lane.HOST)


def test_a_machine_is_read_from_rates() -> None:
    machine = EmulatedMachine.from_rates({**RATES, "name": 0.0}, scale=0.5)
    assert machine.compute_flops_per_s == 5e11
    assert (machine.h2d_bytes_per_s, machine.d2h_bytes_per_s, machine.host_bytes_per_s) == (5e8, 1e9, 2e9)
    assert (machine.device_bytes, machine.jitter_s) == (1000, 0.0)


@pytest.mark.parametrize("key", RATES)
def test_rates_that_lack_a_key_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"lack {key}"):
        EmulatedMachine.from_rates({name: rate for name, rate in RATES.items() if name != key})
