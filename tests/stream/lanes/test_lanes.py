"""Ordering: every missing wait is found whatever the timing, and timing changes no bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import CapacityError, ConfigError
from megatrain.plan.program.kinds import Lane
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import (
    Cause,
    CheckedLanes,
    EmulatedLanes,
    EmulatedMachine,
    Event,
    InlineLanes,
    Lanes,
    OrderingError,
)
from megatrain.stream.lanes.devices import make_lanes
from tests.families import FAMILIES
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER

MISSING_WAITS = {
    "free": Cause(Lane.FETCH, Lane.COMPUTE, "slot"),
    "ready": Cause(Lane.COMPUTE, Lane.FETCH, "slot"),
    "gradient buffer": Cause(Lane.COMPUTE, Lane.OFFLOAD, "gradient_buffer"),
    "offload": Cause(Lane.OFFLOAD, Lane.COMPUTE, "gradient_buffer"),
    "update": Cause(Lane.FETCH, Lane.HOST, "working"),
}
MESSAGES = {
    "free": "lane fetch uses slot . without waiting until lane compute has read it",
    "ready": "lane compute uses slot . without waiting until lane fetch has written it",
    "gradient buffer": "lane compute uses gradient_buffer 0 without waiting until lane offload has read it",
    "offload": "lane offload uses gradient_buffer 0 without waiting until lane compute has written it",
    "update": "lane fetch uses working . without waiting until lane host has written it",
}


class ForgetfulLanes(CheckedLanes):
    """Checked lanes that leave out the waits of one cause, as a bug in the engine would."""

    def __init__(self, forgotten: Cause) -> None:
        super().__init__()
        self.forgotten = forgotten
        self.num_forgotten = 0

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        if cause == self.forgotten:
            self.num_forgotten += 1
        else:
            super()._wait(lane, event, cause)


class HastyLanes(CheckedLanes):
    """Checked lanes whose fetch lane hands out events before it has recorded them."""

    def _record(self, lane: Lane) -> Event:
        event = super()._record(lane)
        event.is_recorded = lane is not Lane.FETCH
        return event


class CountingLanes(CheckedLanes):
    """Checked lanes that note the cause of every wait."""

    def __init__(self) -> None:
        super().__init__()
        self.causes: set[Cause] = set()

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        self.causes.add(cause)
        super()._wait(lane, event, cause)


def train(lanes: Lanes, *, num_steps: int = 2, num_micro_batches: int = 2, **settings: Any) -> Engine:
    """Run a real training of four blocks in two slots."""
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=lanes, **settings)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(num_steps):
        engine.forward_backward(make_batches(num_micro_batches, seed=step))
        optimizer.step()
    return engine


@pytest.mark.parametrize("name", MISSING_WAITS)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_missing_wait_is_found(name: str, activations: str) -> None:
    lanes = ForgetfulLanes(MISSING_WAITS[name])
    with pytest.raises(OrderingError, match=MESSAGES[name]):
        train(lanes, activations=activations)
    assert lanes.num_forgotten > 0


def test_a_missing_update_wait_shows_in_the_second_step_only() -> None:
    """There is nothing to wait for before the first update."""
    lanes = ForgetfulLanes(MISSING_WAITS["update"])
    train(lanes, num_steps=1)
    assert lanes.num_forgotten == 0


@pytest.mark.parametrize("device_lanes", [HastyLanes])
def test_a_wait_for_an_event_that_is_not_recorded_is_found(device_lanes: type[CheckedLanes]) -> None:
    with pytest.raises(OrderingError, match="waits for an event that is not recorded"):
        train(device_lanes())


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("num_gradient_buffers", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_engine_s_own_order_is_sound(num_slots: int, num_gradient_buffers: int, precision: str) -> None:
    """No error in a clean run, and every wait that the injections above leave out does occur in it."""
    lanes = CountingLanes()
    train(lanes, num_slots=num_slots, num_gradient_buffers=num_gradient_buffers, precision=precision)
    assert set(MISSING_WAITS.values()) <= lanes.causes


def test_a_read_in_another_lane_needs_a_wait() -> None:
    """The checker itself, on two operations."""
    lanes = ForgetfulLanes(Cause(Lane.COMPUTE, Lane.FETCH, "slot"))
    lanes.enqueue(Lane.FETCH, lambda: None, writes=[("slot", 0)])
    lanes.enqueue(Lane.COMPUTE, lambda: None, reads=[("slot", 1)])
    with pytest.raises(OrderingError, match="lane compute uses slot 0"):
        lanes.enqueue(Lane.COMPUTE, lambda: None, reads=[("slot", 0)])


def test_waits_carry_over_a_third_lane() -> None:
    """A wait for a lane that has itself waited is enough: clocks are merged."""
    lanes = ForgetfulLanes(Cause(Lane.HOST, Lane.FETCH, "slot"))
    lanes.enqueue(Lane.FETCH, lambda: None, writes=[("slot", 0)])
    lanes.enqueue(Lane.COMPUTE, lambda: None, reads=[("slot", 0)], writes=[("gradient_buffer", 0)])
    lanes.enqueue(Lane.HOST, lambda: None, reads=[("gradient_buffer", 0)])
    lanes.enqueue(Lane.HOST, lambda: None, reads=[("slot", 0)])
    assert lanes.num_forgotten == 1


def test_freed_buffers_are_poisoned() -> None:
    flat = torch.zeros(8, dtype=torch.uint8)
    CheckedLanes().freed(flat)
    assert flat.view(torch.float32).isnan().all()
    assert flat.view(torch.bfloat16).isnan().all()


def trained_masters(lanes: Lanes) -> dict[str, Tensor]:
    """Train one step, and return every master."""
    engine = train(lanes, num_steps=1, num_gradient_buffers=2)
    masters = dict(engine.named_masters())
    engine.detach()
    return masters


@pytest.mark.parametrize("num_seeds", [12, pytest.param(50, marks=pytest.mark.parity)])
def test_jitter_of_lanes_gives_the_same_bits(num_seeds: int) -> None:
    expected = trained_masters(InlineLanes())
    for seed in range(num_seeds):
        masters = trained_masters(EmulatedLanes(EmulatedMachine(seed=seed, jitter_s=1e-4)))
        for name, master in masters.items():
            assert_same_bits(master, expected[name], f"{name}, jitter seed {seed}")


def test_a_forgotten_ready_wait_reads_garbage_on_emulated_lanes() -> None:
    """Emulated lanes are asynchronous in earnest: without a wait, compute overtakes a slow copy."""

    visited = threading.Event()

    class Racing(EmulatedLanes):
        def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
            if cause != MISSING_WAITS["ready"]:
                super()._wait(lane, event, cause)

        def _submit(self, lane: Lane, function: Callable[[], object], work: float, label: object) -> None:
            def slow_copy() -> None:
                visited.wait()
                function()

            is_of_a_slot = lane is Lane.FETCH and "s0" in str(label)
            super()._submit(lane, slow_copy if is_of_a_slot else function, work, label)

        def end(self, lane: Lane, **keywords: Any) -> None:
            if lane is Lane.COMPUTE:
                visited.set()
            super().end(lane, **keywords)

    lanes = Racing()
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=lanes)
    clean = attach_plainly(make_model(FAMILIES["llama_tied"]()))
    assert float(engine.forward_backward(make_batches(1))) != float(clean.forward_backward(make_batches(1)))


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.OFFLOAD])
def test_an_exception_in_a_lane_reaches_the_caller(lane: Lane) -> None:
    """The step fails with the lane's own exception, and the next one is sound again."""

    def fail() -> None:
        raise OSError("the copy failed")

    class Failing(EmulatedLanes):
        countdown = 3

        def _submit(
            self, submitted: Lane, function: Callable[[], object], work: float, label: object
        ) -> None:
            if submitted is lane:
                self.countdown -= 1
                function = fail if self.countdown == 0 else function
            super()._submit(submitted, function, work, label)

    lanes = Failing()
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=lanes)
    with pytest.raises(OSError, match="the copy failed"):
        engine.forward_backward(make_batches(1))
    loss = engine.forward_backward(make_batches(1))
    clean = attach_plainly(make_model(FAMILIES["llama_tied"]()), device="cpu")
    assert_same_bits(loss, clean.forward_backward(make_batches(1)), "loss after a failed copy")
    engine.detach()


def test_a_device_budget_is_kept_before_anything_is_allocated() -> None:
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=1000))
    first = lanes.allocate(600)
    with pytest.raises(
        CapacityError, match="device budget of 1,000 bytes cannot hold 401 bytes more than the 600"
    ):
        lanes.allocate(401)
    assert lanes.device_bytes == 600
    lanes.allocate(400)
    lanes.free([first])
    assert (lanes.device_bytes, lanes.peak_device_bytes) == (400, 1000)
    lanes.close()


@pytest.mark.parametrize("device_bytes", [0, 20_000])
def test_a_model_that_does_not_fit_the_budget_is_refused(device_bytes: int) -> None:
    model = make_model(FAMILIES["llama_tied"]())
    with pytest.raises(CapacityError, match=r"device (budget|memory)"):
        attach_plainly(model, device=InlineLanes(device_limit=device_bytes))


def test_devices_have_names() -> None:
    assert type(make_lanes("cpu")) is InlineLanes
    assert type(make_lanes("checked")) is CheckedLanes
    lanes = make_lanes("emulated")
    assert type(lanes) is EmulatedLanes
    assert make_lanes(lanes) is lanes
    lanes.close()
    for name in ("tpu", "mps", "mps:0"):
        with pytest.raises(
            ConfigError, match=f"^device is '{name}', on which megatrain cannot run; use auto, cpu"
        ):
            make_lanes(name)


def test_auto_passes_over_an_accelerator_that_is_not_in_the_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert type(make_lanes("auto")) is InlineLanes
    assert "torch offers mps, on which megatrain cannot run: device=cpu" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        make_lanes("cuda")
