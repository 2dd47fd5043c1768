"""The order of lanes on streams that are threads: launching returns at once, and copies take their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes import AcceleratorLanes, Cause, InlineLanes, locked_ring
from tests.clocks import watch_events
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.lanes.lane_programs import run_program
from tests.stream.runs import HYPER

DEVICE = torch.device(TYPE, 0)
host = register()


@pytest.fixture
def lanes() -> Iterator[AcceleratorLanes]:
    """Lanes on the test device, whose streams dawdle."""
    host.native.delay(1, 0.5, 5e-5, 0.0)
    made = AcceleratorLanes(torch.device(TYPE))
    yield made
    made.close()
    host.native.delay(0, 0.0, 0.0, 0.0)


def launch(work: Callable[[], object]) -> None:
    """Launch into the current stream."""
    host.native.launch(work)


def test_random_programs_give_what_inline_lanes_give(lanes: AcceleratorLanes) -> None:
    for seed in range(100):
        assert torch.equal(run_program(lanes, seed, launch=launch), run_program(InlineLanes(), seed)), seed


def test_each_operation_has_one_span_in_its_lane_s_order(lanes: AcceleratorLanes) -> None:
    run_program(lanes, 7, num_operations=60, launch=launch)
    spans = lanes.take_record().spans
    assert sorted(span.label for span in spans) == sorted(f"op{number}" for number in range(60))
    for lane in Lane:
        numbers = [int(span.label[2:]) for span in spans if span.lane is lane]
        assert numbers == sorted(numbers)


def test_spans_are_looked_up_when_nobody_takes_the_record(
    lanes: AcceleratorLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the device's events would pile up."""
    monkeypatch.setattr("megatrain.stream.lanes.accelerator.MAX_UNRESOLVED", 8)
    for number in range(50):
        lanes.enqueue(Lane.FETCH, lambda: launch(lambda: None), writes=[("slot", 0)], label=str(number))
        lanes.begin(Lane.CALLER, reads=[("slot", 0)])  # a drain would look all of them up
        lanes.end(Lane.CALLER, reads=[("slot", 0)])
    assert len(lanes._spans._pending[Lane.FETCH]) == 8
    spans = lanes.take_record().spans
    assert [span.label for span in spans if span.lane is Lane.FETCH] == [str(number) for number in range(50)]


def test_an_event_of_the_device_is_made_once_and_recorded_again(
    lanes: AcceleratorLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation has two, for its time and for those who wait for it."""
    made: list[torch.Event] = []
    event = torch.Event

    def make(**options: Any) -> torch.Event:
        made.append(event(**options))
        return made[-1]

    monkeypatch.setattr(torch, "Event", make)
    for seed in range(20):
        assert torch.equal(run_program(lanes, seed, launch=launch), run_program(InlineLanes(), seed)), seed
        lanes.take_record()
        if seed == 4:
            made.clear()
    assert len(made) <= 20  # where more operations were under way than ever before


def test_compute_goes_on_when_a_copy_is_launched_and_not_when_it_is_done(lanes: AcceleratorLanes) -> None:
    """The launching thread never waits for the device; neither does taking the record."""
    gate = threading.Event()
    order: list[str] = []
    host.native.take_counts()
    lanes.enqueue(Lane.FETCH, lambda: launch(gate.wait), writes=[("slot", 0)], label="fetch")
    lanes.begin(Lane.COMPUTE, reads=[("slot", 0)], label="compute")
    launch(lambda: order.append("compute"))
    lanes.end(Lane.COMPUTE, reads=[("slot", 0)])
    assert lanes.take_record().spans == []
    assert host.native.take_counts() == {}
    assert order == []
    gate.set()
    lanes.drain()
    assert [span.label for span in lanes.take_record().spans] == ["fetch", "compute"]


def test_a_slow_update_holds_up_its_fetch_and_then_compute(
    lanes: AcceleratorLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, now_s = watch_events(monkeypatch)
    gate = threading.Event()
    order: list[str] = []

    def update() -> None:
        gate.wait()
        order.append("update")

    def fetch() -> None:
        launch(lambda: order.append("fetch"))

    def open_gate() -> None:
        for _ in range(2):  # the fetch for the update, and compute for the fetch
            events.until_one_waits()
        now_s[0] += 1.0
        gate.set()

    lanes.enqueue(Lane.HOST, update, writes=[("working", 0)])
    lanes.enqueue(Lane.FETCH, fetch, reads=[("working", 0)], writes=[("slot", 0)])
    assert not [wait for wait in lanes.take_record().waits if wait.cause.waiting is Lane.COMPUTE]
    threading.Thread(target=open_gate).start()
    lanes.begin(Lane.COMPUTE, reads=[("slot", 0)])
    launch(lambda: order.append("compute"))
    lanes.end(Lane.COMPUTE, reads=[("slot", 0)])
    lanes.drain()
    assert order == ["update", "fetch", "compute"]
    causes = {wait.cause for wait in lanes.take_record().waits}
    assert {Cause(Lane.COMPUTE, Lane.FETCH, "slot"), Cause(Lane.FETCH, Lane.HOST, "working")} <= causes


def test_a_shared_tensor_is_kept_until_the_lane_is_done_with_it(lanes: AcceleratorLanes) -> None:
    gate = threading.Event()
    size = 8 << 20  # more than any block that other tests have freed, so that only these tensors can have it
    for is_shared in (False, True):
        tensor = torch.ones(size, device=DEVICE)
        address = tensor.data_ptr()
        gate.clear()
        launched = threading.Event()

        def save(launched: threading.Event = launched) -> None:
            launch(gate.wait)
            launched.set()

        lanes.enqueue(Lane.SAVE, save, writes=[("saved", 0)])
        launched.wait()
        lanes.begin(Lane.COMPUTE)
        lanes.end(Lane.COMPUTE)
        if is_shared:
            lanes.share(tensor, Lane.SAVE)
        del tensor
        is_kept = torch.ones(size, device=DEVICE).data_ptr() != address
        gate.set()
        assert is_kept is is_shared
        lanes.drain()
        assert torch.ones(size, device=DEVICE).data_ptr() == address
    lanes.share(torch.zeros(1), Lane.SAVE)


@pytest.mark.parametrize("waiting", [Lane.CALLER, Lane.HOST])
def test_the_host_waits_until_a_copy_is_done(lanes: AcceleratorLanes, waiting: Lane) -> None:
    gate = threading.Event()
    arrived: list[bool] = []
    seen: list[bool] = []

    def copy() -> None:
        gate.wait()
        arrived.append(True)

    lanes.enqueue(Lane.OFFLOAD, lambda: launch(copy), writes=[("gradient", 0)])
    threading.Timer(0.02, gate.set).start()
    if waiting is Lane.HOST:
        lanes.enqueue(Lane.HOST, lambda: seen.extend(arrived), reads=[("gradient", 0)])
    else:
        lanes.begin(Lane.CALLER, reads=[("gradient", 0)])
        seen.extend(arrived)
        lanes.end(Lane.CALLER, reads=[("gradient", 0)])
    lanes.drain()
    assert seen == [True]


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.OFFLOAD, Lane.SAVE, Lane.RESTORE, Lane.HOST])
def test_a_failure_reaches_the_caller_and_holds_up_nobody(lanes: AcceleratorLanes, lane: Lane) -> None:
    ran: list[str] = []
    gate = threading.Event()

    def fail() -> None:
        gate.wait()
        raise OSError("the launch failed")

    other = Lane.HOST if lane is not Lane.HOST else Lane.FETCH
    lanes.enqueue(lane, fail, writes=[("slot", 0)])
    lanes.enqueue(other, lambda: ran.append("after the failure"), reads=[("slot", 0)])
    gate.set()
    with pytest.raises(OSError, match="the launch failed"):
        lanes.begin(Lane.COMPUTE, reads=[("slot", 0)])
    lanes.drain()
    assert ran == []


def test_device_work_that_the_host_lane_launched_is_waited_for_after_later_host_work(
    lanes: AcceleratorLanes,
) -> None:
    """That the lane has done what came later does not mean that the device has."""
    done: list[str] = []

    def slow_kernel() -> None:
        time.sleep(0.05)
        done.append("update")

    def update() -> None:
        with lanes.computing():
            launch(slow_kernel)

    lanes.enqueue(Lane.HOST, update, writes=[("resident", 0)])
    lanes.enqueue(Lane.HOST, lambda: None, writes=[("working", 1)])
    lanes.enqueue(Lane.OFFLOAD, lambda: None, reads=[("working", 1)])
    lanes.enqueue(Lane.OFFLOAD, lambda: launch(lambda: done.append("push")), reads=[("resident", 0)])
    lanes.drain()
    assert done == ["update", "push"]


def test_the_whole_state_of_resident_layers_crosses_in_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Remainders and moments lie in memory that is not locked."""
    monkeypatch.setattr(locked_ring, "BUFFER_BYTES", 1024)
    masters = []
    for num_resident in (0, 2):
        model = make_model(FAMILIES["llama_tied"]())
        engine = attach_plainly(model, device=TYPE, precision="bf16", resident_layers=num_resident)
        optimizer = engine.adamw(**HYPER)
        host.native.take_counts()
        for step in range(2):
            engine.forward_backward(make_batches(1, seed=step))
            optimizer.step()
            engine.sync()
            engine.weights_changed()  # the next step copies all of it to the device again
        assert "copy of unlocked memory" not in host.native.take_counts()
        masters.append(dict(engine.named_masters()))
        engine.detach()
    assert masters[0].keys() == masters[1].keys()
    for name, master in masters[0].items():
        assert_same_bits(masters[1][name], master, name)


def test_another_thread_sees_the_visits_that_the_device_has_done() -> None:
    """Not those that are launched: the stream stands still at the second layer, and nobody waits for it."""
    model = make_model(FAMILIES["llama_tied"]())
    engine = attach_plainly(model, device=TYPE, activations="recompute", num_micro_batches=2, lockstep=2)
    gate, is_held = threading.Event(), list[bool]()

    def hold(*_: Any) -> None:
        if not is_held:
            launch(gate.wait)
            is_held.append(True)

    model.get_decoder().layers[1].mlp.register_forward_hook(hold)
    step = threading.Thread(target=engine.forward_backward, args=(make_batches(2),))
    step.start()
    try:
        deadline_s = time.monotonic() + 20
        while (passed := engine.passed()) is None or passed.num_visits < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        time.sleep(0.1)
        passed = engine.passed()
        assert passed is not None
        assert passed.num_visits == 2, "two micro-batches in the first layer"
    finally:
        gate.set()
        step.join()
    engine.settle()
    done = engine.passed()
    assert done is not None
    assert (done.num_visits, done.share) == (done.num_foreseen, 1.0)
