"""The order of CUDA lanes, on streams that are threads: what no test without a GPU could see otherwise.

The pretend streams have CUDA's own traps: launching returns at once, a wait for an event that was not
recorded is no wait, the current stream belongs to a thread. What they cannot show is whether torch's calls do
what these say.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatrain.plan.program.operations import Lane
from megatrain.stream.lanes import Cause, CudaLanes, InlineLanes
from tests.clocks import watch_events
from tests.stream.lanes.lane_programs import run_program

DEVICE = torch.device("cuda", 0)


class PretendStream:
    """A thread that runs what is launched, in order, each after a short delay."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = DEVICE
        self.chance = random.Random(0)
        self.tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            task = self.tasks.get()
            time.sleep(self.chance.random() * 5e-5)
            task()

    def launch(self, task: Callable[[], object]) -> None:
        self.tasks.put(task)

    def wait_event(self, event: PretendEvent) -> None:
        if event.passed is not None:
            self.launch(event.passed.wait)

    def synchronize(self) -> None:
        passed = threading.Event()
        self.launch(passed.set)
        passed.wait()


class PretendEvent:
    """A point in a pretend stream."""

    num_synchronized = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.passed: threading.Event | None = None
        self.passed_s = 0.0

    def record(self, stream: PretendStream) -> None:
        passed = self.passed = threading.Event()

        def run() -> None:
            self.passed_s = time.perf_counter()
            passed.set()

        stream.launch(run)

    def query(self) -> bool:
        return self.passed is None or self.passed.is_set()

    def synchronize(self) -> None:
        PretendEvent.num_synchronized += 1
        if self.passed is not None:
            self.passed.wait()

    def elapsed_time(self, end: PretendEvent) -> float:
        assert self.query()
        assert end.query()
        return (end.passed_s - self.passed_s) * 1e3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaLanes]:
    """CUDA lanes on pretend streams."""
    default = PretendStream()
    current = threading.local()
    streams = [default]

    def current_stream(device: torch.device) -> PretendStream:
        assert device == DEVICE
        stream: PretendStream = getattr(current, "stream", default)
        return stream

    def make_stream(device: torch.device) -> PretendStream:
        streams.append(PretendStream())
        return streams[-1]

    @contextmanager
    def on_stream(stream: PretendStream) -> Iterator[None]:
        assert current.device == DEVICE
        current.stream = stream
        yield
        del current.stream

    def synchronize(device: torch.device) -> None:
        for stream in streams:
            stream.synchronize()

    fakes = {
        "Stream": make_stream,
        "Event": PretendEvent,
        "current_stream": current_stream,
        "current_device": lambda: 0,
        "stream": on_stream,
        "set_device": lambda device: setattr(current, "device", device),
        "synchronize": synchronize,
        "reset_peak_memory_stats": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    lanes = CudaLanes(torch.device("cuda"))
    yield lanes
    lanes.close()


def launch(work: Callable[[], object]) -> None:
    """Launch into the current stream."""
    stream: object = torch.cuda.current_stream(DEVICE)
    assert isinstance(stream, PretendStream)
    stream.launch(work)


def test_random_programs_give_what_inline_lanes_give(cuda: CudaLanes) -> None:
    for seed in range(100):
        assert torch.equal(run_program(cuda, seed, launch=launch), run_program(InlineLanes(), seed)), seed


def test_each_operation_has_one_span_in_its_lane_s_order(cuda: CudaLanes) -> None:
    run_program(cuda, 7, num_operations=60, launch=launch)
    spans = cuda.take_record().spans
    assert sorted(span.label for span in spans) == sorted(f"op{number}" for number in range(60))
    for lane in Lane:
        numbers = [int(span.label[2:]) for span in spans if span.lane is lane]
        assert numbers == sorted(numbers)


def test_spans_are_looked_up_when_nobody_takes_the_record(
    cuda: CudaLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the device's events would pile up."""
    monkeypatch.setattr("megatrain.stream.lanes.cuda.MAX_UNRESOLVED", 8)
    for number in range(50):
        cuda.enqueue(Lane.FETCH, lambda: launch(lambda: None), writes=[("slot", 0)], label=str(number))
        cuda.begin(Lane.CALLER, reads=[("slot", 0)])  # a drain would look all of them up
        cuda.end(Lane.CALLER, reads=[("slot", 0)])
    assert len(cuda._spans._pending[Lane.FETCH]) == 8
    spans = cuda.take_record().spans
    assert [span.label for span in spans if span.lane is Lane.FETCH] == [str(number) for number in range(50)]


def test_compute_goes_on_when_a_copy_is_launched_and_not_when_it_is_done(cuda: CudaLanes) -> None:
    """The launching thread never waits for the device; neither does taking the record."""
    gate = threading.Event()
    order: list[str] = []
    synchronized = PretendEvent.num_synchronized
    cuda.enqueue(Lane.FETCH, lambda: launch(gate.wait), writes=[("slot", 0)], label="fetch")
    cuda.begin(Lane.COMPUTE, reads=[("slot", 0)], label="compute")
    launch(lambda: order.append("compute"))
    cuda.end(Lane.COMPUTE, reads=[("slot", 0)])
    assert cuda.take_record().spans == []
    assert PretendEvent.num_synchronized == synchronized
    assert order == []
    gate.set()
    cuda.drain()
    assert [span.label for span in cuda.take_record().spans] == ["fetch", "compute"]


def test_a_slow_update_holds_up_its_fetch_and_then_compute(
    cuda: CudaLanes, monkeypatch: pytest.MonkeyPatch
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

    cuda.enqueue(Lane.HOST, update, writes=[("working", 0)])
    cuda.enqueue(Lane.FETCH, fetch, reads=[("working", 0)], writes=[("slot", 0)])
    assert not [wait for wait in cuda.take_record().waits if wait.cause.waiting is Lane.COMPUTE]
    threading.Thread(target=open_gate).start()
    cuda.begin(Lane.COMPUTE, reads=[("slot", 0)])
    launch(lambda: order.append("compute"))
    cuda.end(Lane.COMPUTE, reads=[("slot", 0)])
    cuda.drain()
    assert order == ["update", "fetch", "compute"]
    causes = {wait.cause for wait in cuda.take_record().waits}
    assert {Cause(Lane.COMPUTE, Lane.FETCH, "slot"), Cause(Lane.FETCH, Lane.HOST, "working")} <= causes


def test_a_shared_tensor_is_kept_for_the_lane_s_own_stream(cuda: CudaLanes) -> None:
    class DeviceTensor:
        is_cuda = True
        streams: list[object] = []  # noqa: RUF012

        def record_stream(self, stream: object) -> None:
            self.streams.append(stream)

    tensor: Any = DeviceTensor()
    cuda.share(tensor, Lane.SAVE)
    cuda.share(tensor, Lane.COMPUTE)
    assert tensor.streams == [cuda._streams[Lane.SAVE], torch.cuda.current_stream(DEVICE)]
    cuda.share(torch.zeros(1), Lane.SAVE)


@pytest.mark.parametrize("waiting", [Lane.CALLER, Lane.HOST])
def test_the_host_waits_until_a_copy_is_done(cuda: CudaLanes, waiting: Lane) -> None:
    gate = threading.Event()
    arrived: list[bool] = []
    seen: list[bool] = []

    def copy() -> None:
        gate.wait()
        arrived.append(True)

    cuda.enqueue(Lane.OFFLOAD, lambda: launch(copy), writes=[("gradient", 0)])
    threading.Timer(0.02, gate.set).start()
    if waiting is Lane.HOST:
        cuda.enqueue(Lane.HOST, lambda: seen.extend(arrived), reads=[("gradient", 0)])
    else:
        cuda.begin(Lane.CALLER, reads=[("gradient", 0)])
        seen.extend(arrived)
        cuda.end(Lane.CALLER, reads=[("gradient", 0)])
    cuda.drain()
    assert seen == [True]


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.OFFLOAD, Lane.SAVE, Lane.RESTORE, Lane.HOST])
def test_a_failure_reaches_the_caller_and_holds_up_nobody(cuda: CudaLanes, lane: Lane) -> None:
    ran: list[str] = []
    gate = threading.Event()

    def fail() -> None:
        gate.wait()
        raise OSError("the launch failed")

    other = Lane.HOST if lane is not Lane.HOST else Lane.FETCH
    cuda.enqueue(lane, fail, writes=[("slot", 0)])
    cuda.enqueue(other, lambda: ran.append("after the failure"), reads=[("slot", 0)])
    gate.set()
    with pytest.raises(OSError, match="the launch failed"):
        cuda.begin(Lane.COMPUTE, reads=[("slot", 0)])
    cuda.drain()
    assert ran == []
