"""Bugs that an accelerator's code could have, put in one at a time.

Each is caught by the comparison with the resident model, by the device's counts, or by its trap.

Where a fault is a matter of time, streams are slow where that lets it show.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.model import torch_state
from megatrain.plan.program.kinds import Lane
from megatrain.store.arena import Arena
from megatrain.stream.activations.host_ring import HostBuffer, HostRing
from megatrain.stream.lanes import AcceleratorLanes, Cause, Event
from megatrain.stream.lanes.accelerator import HostWorker, StreamWorker
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream import runs
from tests.stream.runs import HYPER, assert_same_round, check_parity, start

host = register()
ROOT = Path(__file__).parents[3]
Patch = pytest.MonkeyPatch

PROMPT = (1, 0.0, 0.0, 0.0)
SLOW_COPIES = (1, 0.0, 0.0, 4e-2)
LATE_COPIES = (1, 0.0, 0.0, 0.15)
SLOW_KERNELS = (1, 1.0, 2e-4, 0.0)
"""Seed, chance of a delay, the longest one, that of a copy; as `native.delay` takes them.

Late copies come after what does not wait for them on a busy computer too."""
MISSING_WAITS = {
    "a copy home that does not wait for compute": Cause(Lane.OFFLOAD, Lane.COMPUTE, "gradient_buffer"),
    "compute that does not wait for its weights": Cause(Lane.COMPUTE, Lane.FETCH, "slot"),
    "a slot that is reused early": Cause(Lane.FETCH, Lane.COMPUTE, "slot"),
    "a gradient buffer that is reused early": Cause(Lane.COMPUTE, Lane.OFFLOAD, "gradient_buffer"),
}


def leave_out(forgotten: Cause) -> Callable[[Patch], None]:
    """Return what leaves out the waits of one cause."""

    def inject(patch: Patch) -> None:
        wait = AcceleratorLanes._wait

        def forgetful(self: AcceleratorLanes, lane: Lane, event: Event, cause: Cause) -> None:
            if cause != forgotten:
                wait(self, lane, event, cause)

        patch.setattr(AcceleratorLanes, "_wait", forgetful)

    return inject


def with_slow_updates(inject: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Let what the host does take longer than a copy."""

    def also(patch: Patch) -> None:
        inject(patch)
        run = HostWorker._run

        def late(self: HostWorker, *arguments: Any) -> None:
            time.sleep(0.1)
            run(self, *arguments)

        patch.setattr(HostWorker, "_run", late)

    return also


def wait_before_recorded(patch: Patch) -> None:
    """A copy's thread does not wait until what it needs was launched: its stream then waits for nothing."""
    patch.setattr(StreamWorker, "_until_launched", lambda *_: None)


def lose_random_state(patch: Patch) -> None:
    """A recomputation goes on from where the generator is."""
    patch.setattr(host, "set_rng_state", lambda state, device=None: None)


def mistake_the_device(patch: Patch) -> None:
    """The states of another device's generator are kept and put back."""
    other = torch.device(TYPE, 1)
    patch.setattr(torch_state, "random_state", lambda device: host.get_rng_state(other))
    patch.setattr(torch_state, "set_random_state", lambda device, state: host.set_rng_state(state, other))


Fault = tuple[Callable[[Patch], None], tuple[float, ...], dict[str, Any]]
FAULTS: dict[str, Fault] = {
    name: (leave_out(cause), SLOW_KERNELS if cause.owner is Lane.COMPUTE else LATE_COPIES, {})
    for name, cause in MISSING_WAITS.items()
} | {
    "a fetch that does not wait for the update": (
        with_slow_updates(leave_out(Cause(Lane.FETCH, Lane.HOST, "working"))),
        PROMPT,
        {},
    ),
    "an event waited for before it is recorded": (with_slow_updates(wait_before_recorded), PROMPT, {}),
    "a recomputation with lost random state": (lose_random_state, PROMPT, {"lockstep": 1}),
    "a wrong device for a generator": (mistake_the_device, PROMPT, {"activations": "keep"}),
}


@pytest.fixture(autouse=True)
def _healed(monkeypatch: Patch) -> Iterator[None]:
    """Let everything that was launched end while its memory is there, and forget what went wrong."""
    engines = []

    def attach(*arguments: Any, **settings: Any) -> Any:
        engines.append(attach_plainly(*arguments, **settings))
        return engines[-1]

    monkeypatch.setattr(runs, "attach_plainly", attach)
    yield
    for engine in engines:
        with suppress(AssertionError, RuntimeError):
            engine.lanes.close()
    host.native.settle()


def train(delays: tuple[float, ...], settings: dict[str, Any]) -> None:
    """Train two steps of two micro-batches with dropout, and compare all."""
    host.native.delay(*delays)
    given = {"lockstep": 2, "activations": "recompute", "num_slots": 2, "num_gradient_buffers": 1, **settings}
    check_parity("gpt2", device=TYPE, num_micro_batches=2, dropout=True, **given)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str, monkeypatch: Patch) -> None:
    inject, delays, settings = FAULTS[name]
    with monkeypatch.context() as patch:
        inject(patch)
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            train(delays, settings)
    print(f"{name}: {str(caught.value).splitlines()[0]}")


@pytest.mark.parametrize("delays", [SLOW_COPIES, pytest.param(SLOW_KERNELS, marks=pytest.mark.parity)])
@pytest.mark.parametrize("settings", [{}, {"lockstep": 1}, {"activations": "keep"}], ids=str)
def test_without_a_fault_the_same_runs_pass(settings: dict[str, Any], delays: tuple[float, ...]) -> None:
    train(delays, settings)


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_missing_record_stream_shows_after_a_step_that_failed(is_faulty: bool, monkeypatch: Patch) -> None:
    """Copies of saved activations are still to come then, into memory that the next step is given."""
    if is_faulty:
        monkeypatch.setattr(AcceleratorLanes, "share", lambda *_: None)
    host.native.delay(1, 0.0, 0.0, 4e-3)
    model, reference, engine, _ = start("llama_tied", device=TYPE, activations="offload")
    engine.arrangement.offloaded._min_bytes = 1

    def fail(_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_hook(lambda *call: call[-1].register_hook(fail) and None)
    with pytest.raises(KeyboardInterrupt):
        engine.forward_backward(make_batches(1), seeds=[1])
    hook.remove()
    if is_faulty:
        with pytest.raises((AssertionError, RuntimeError)):
            assert_same_round(engine, reference, make_batches(1, seed=1), [2])
    else:
        assert_same_round(engine, reference, make_batches(1, seed=1), [2])


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_copy_of_unlocked_memory_taken_as_asynchronous_is_counted(
    is_faulty: bool, monkeypatch: Patch
) -> None:
    """It would hold up its lane's thread, and nothing else would tell."""
    if is_faulty:
        monkeypatch.setattr(Arena, "lock", lambda *_: True)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=TYPE)
    optimizer = engine.adamw(**HYPER)
    engine.forward_backward(make_batches(1))
    optimizer.step()
    engine.lanes.close()
    assert ("copy of unlocked memory" in host.native.take_counts()) is is_faulty


@pytest.mark.parametrize("is_faulty", [False, True])
def test_an_early_unlock_of_the_ring_is_counted(is_faulty: bool, monkeypatch: Patch) -> None:
    """The copies of saved activations that are still to come use memory that the driver has let go."""
    if is_faulty:
        monkeypatch.setattr(HostBuffer, "unmake", lambda self, lanes: lanes.unlock(self.arena))
    host.native.delay(*LATE_COPIES)
    lanes = AcceleratorLanes(torch.device(TYPE))
    ring = HostRing(lanes, None)
    buffer, _ = ring.take([4096])
    assert buffer is not None
    there = torch.ones(4096, dtype=torch.uint8, device=TYPE)
    host.native.take_counts()
    is_launched = threading.Event()

    def save() -> None:
        lanes.copy(buffer.flat[:4096], there)
        is_launched.set()

    lanes.enqueue(Lane.SAVE, save, writes=[("offloaded", buffer.index)])
    assert is_launched.wait(60)
    ring.give_back(buffer)
    ring.trim()
    host.native.settle()
    lanes.close()
    assert ("copy of memory unlocked under it" in host.native.take_counts()) is is_faulty


@pytest.mark.parity
def test_the_host_s_read_of_device_memory_is_trapped() -> None:
    """In a child, whose stack says where it was; `test_device.py` has the trap itself."""
    code = (
        "import ctypes, faulthandler; faulthandler.enable()\n"
        "from tests.host_device.device import register; register()\n"
        "from tests.reference import attach_plainly, make_batches, make_model\n"
        "from tests.families import FAMILIES\n"
        "from megatrain.stream.lanes import AcceleratorLanes\n"
        "def sum_on_the_host(self, flats, out):\n"
        "    for flat in flats: ctypes.c_float.from_address(flat.data_ptr()).value\n"
        "AcceleratorLanes.sum_of_squares = sum_on_the_host\n"
        "engine = attach_plainly(make_model(FAMILIES['llama_tied']()), device='host')\n"
        "optimizer = engine.adamw(lr=1e-3, max_grad_norm=1.0)\n"
        "engine.forward_backward(make_batches(1))\n"
        "optimizer.step().grad_norm\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ})
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    assert "in sum_on_the_host" in ended.stderr
