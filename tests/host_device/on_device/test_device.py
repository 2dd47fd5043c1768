"""The test device behaves as an accelerator does, in what goes wrong too."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatrain.hardware.accelerators import check_accelerator, vendor_of
from megatrain.store.arena import Arena
from tests.host_device.device import TYPE, register

host = register()
DEVICE = torch.device(TYPE, 0)
ROOT = Path(__file__).parents[3]


def hold(stream: torch.Stream) -> threading.Event:
    """Let a stream do nothing until the event is set."""
    gate = threading.Event()
    with stream:
        host.native.launch(gate.wait)
    return gate


def test_the_host_is_trapped_where_it_reads_device_memory() -> None:
    """In a child, which says where it was."""
    code = (
        "import ctypes, faulthandler; faulthandler.enable()\n"
        "import torch; from tests.host_device.device import register; register()\n"
        "tensor = torch.ones(4, device='host')\n"
        "def peek(): return ctypes.c_float.from_address(tensor.data_ptr()).value\n"
        "peek()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    assert "in peek" in ended.stderr


def test_every_result_lies_in_device_memory() -> None:
    x = torch.randn(6, 6, device=DEVICE)
    results = [
        x @ x,
        x.nonzero(),
        x[x > 0],
        x.t(),
        x.new_empty(0, 3),
        torch.linalg.qr(x)[0],
        x.to(torch.bfloat16),
    ]
    results += [*x.split(2), torch.histc(torch.tensor([1, 2, 2], dtype=torch.int32, device=DEVICE), 3, 0, 2)]
    for result in results:
        assert result.device == DEVICE
        assert host.native.holds(result.data_ptr()) == (0 if result.numel() else -1)
    assert results[-1].tolist() == [0, 1, 2]


def test_kernels_run_in_their_stream_s_order_and_launching_returns_at_once() -> None:
    one, other = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    gate = hold(one)
    x = torch.ones(3, device=DEVICE)
    torch.accelerator.current_stream().synchronize()
    with one:
        x.add_(1)
        recorded = one.record_event()
    assert not recorded.query()
    assert x.tolist() == [1, 1, 1]  # nobody waited
    other.wait_event(recorded)
    with other:
        x.mul_(10)
    assert x.tolist() == [1, 1, 1]
    gate.set()
    other.synchronize()
    assert x.tolist() == [20, 20, 20]


def test_a_wait_for_an_event_that_nobody_recorded_is_none() -> None:
    stream = torch.Stream(device=DEVICE)
    event = torch.Event(device=DEVICE)
    stream.wait_event(event)
    stream.synchronize()
    assert event.query()


def test_events_tell_the_time_between_them() -> None:
    host.native.delay(1, 1.0, 0.0, 0.01)
    arena = Arena(4096)
    assert arena.lock(vendor_of(DEVICE))
    target = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    stream = torch.accelerator.current_stream()
    events = [torch.Event(device=DEVICE, enable_timing=True) for _ in range(2)]
    events[0].record(stream)
    target.copy_(arena.view(torch.uint8, 0, 4096), non_blocking=True)
    events[1].record(stream)
    events[1].synchronize()
    assert events[0].elapsed_time(events[1]) >= 10
    arena.unlock()


@pytest.mark.parametrize("is_locked", [False, True])
@pytest.mark.parametrize("is_fetch", [False, True])
def test_copies_run_behind_the_host_where_its_memory_is_locked(is_fetch: bool, is_locked: bool) -> None:
    arena = Arena(4 * mmap.PAGESIZE)
    here = arena.view(torch.float32, 0, 64).fill_(1)
    there = torch.full((64,), 2.0, device=DEVICE)
    torch.accelerator.synchronize()
    if is_locked:
        assert arena.lock(vendor_of(DEVICE))
    host.native.take_counts()
    gate = hold(torch.accelerator.current_stream())
    if not is_locked:
        gate.set()  # such a copy waits for the stream, and so would this thread
    (there if is_fetch else here).copy_(here if is_fetch else there, non_blocking=True)
    assert host.native.take_counts().get("copy of unlocked memory", 0) == (not is_locked)
    if is_locked:
        assert here.tolist() == [1] * 64
        if is_fetch:
            here.fill_(3)  # too early: the copy has not read it
        gate.set()
        torch.accelerator.synchronize()
    expected = (3 if is_locked else 1) if is_fetch else 2
    assert (there.cpu() if is_fetch else here).tolist() == [expected] * 64
    arena.unlock()


def test_freed_memory_is_handed_out_again_at_once_and_poisoned() -> None:
    x = torch.ones(1000, device=DEVICE)
    address = x.data_ptr()
    gate = hold(torch.accelerator.current_stream())
    doubled = x * 2  # runs later, and before what comes next in this stream
    del x
    again = torch.empty(1000, device=DEVICE)
    assert again.data_ptr() == address
    gate.set()
    assert doubled.tolist() == [2] * 1000
    assert again.isnan().all()


def test_memory_that_another_stream_uses_is_kept_only_if_that_is_recorded() -> None:
    stream = torch.Stream(device=DEVICE)
    for is_recorded in (False, True):
        x = torch.ones(1000, device=DEVICE)
        torch.accelerator.synchronize()
        gate = hold(stream)
        with stream:
            doubled = x * 2
        if is_recorded:
            x.record_stream(stream)
        del x
        torch.accelerator.current_stream().synchronize()
        gate.set()
        stream.synchronize()
        assert doubled.isnan().all().item() is not is_recorded


def test_a_kernel_that_fails_is_told_by_who_comes_next() -> None:
    """In a child: as on CUDA, the stream is of no use afterwards."""
    code = (
        "import torch; from tests.host_device.device import register; register()\n"
        "table = torch.ones(4, 4, device='host')\n"
        "row = torch.nn.functional.embedding(torch.tensor([7], device='host'), table)\n"
        "try: row.cpu()\n"
        "except RuntimeError as error: assert 'a kernel on the test device has failed' in str(error), error\n"
        "else: raise SystemExit('nobody was told')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ})


def test_random_numbers_are_drawn_when_they_are_launched_from_the_device_s_own_generator() -> None:
    torch.manual_seed(3)
    on_host = torch.get_rng_state()
    first = torch.rand(5, device=DEVICE)
    state = host.get_rng_state(DEVICE)
    gate = hold(torch.accelerator.current_stream())
    second = torch.rand(5, device=DEVICE)
    host.set_rng_state(state, DEVICE)  # before the kernel has run
    gate.set()
    again = torch.rand(5, device=DEVICE)
    assert torch.equal(torch.get_rng_state(), on_host)
    assert torch.equal(again, second)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device=DEVICE), first)
    own = torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(torch.rand(5, device=DEVICE, generator=own), first)
    with pytest.raises(RuntimeError, match="Expected a"):
        torch.rand(5, device=DEVICE, generator=torch.Generator())


def test_devices_are_apart() -> None:
    assert check_accelerator(TYPE) == DEVICE
    assert check_accelerator(f"{TYPE}:1").index == 1
    x, y = torch.ones(3, device="host:0"), torch.ones(3, device="host:1")
    assert [host.native.holds(tensor.data_ptr()) for tensor in (x, y)] == [0, 1]
    with pytest.raises(RuntimeError, match="on the same device"):
        x + y
    assert (x + y.to("host:0")).tolist() == [2, 2, 2]
    torch.manual_seed(0)
    drawn = torch.rand(3, device="host:0")
    assert torch.equal(torch.rand(3, device="host:1").cpu(), drawn.cpu())  # each counts for itself
    with host.device(1):
        assert torch.empty(1, device=TYPE).device.index == 1
    with pytest.raises(RuntimeError, match="of device 1"):
        torch.rand(3, device="host:1", generator=torch.Generator("host:0"))


def test_recomputation_draws_the_same_dropout_and_autocast_casts() -> None:
    weight = torch.randn(64, 64, device=DEVICE, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ weight, 0.5)

    x = torch.randn(8, 64, device=DEVICE)
    gradients: list[torch.Tensor] = []
    for again in (False, True):
        torch.manual_seed(5)
        weight.grad = None
        with torch.autocast(TYPE, dtype=torch.bfloat16):
            out = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        assert out.dtype == torch.bfloat16
        torch.rand(3, device=DEVICE)
        out.float().sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad.cpu())
    assert torch.equal(*gradients)


def test_backward_runs_in_a_thread_of_its_own() -> None:
    threads = []
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: threads.append(threading.get_ident()))
    y.sum().backward()
    with torch.autograd.set_multithreading_enabled(False):
        (x * 2).register_hook(lambda grad: threads.append(threading.get_ident()))
        z = x * 3
        z.register_hook(lambda grad: threads.append(threading.get_ident()))
        z.sum().backward()
    assert [thread == threading.get_ident() for thread in threads] == [False, True]


def test_launching_waits_for_nothing_but_data_that_shapes_depend_on() -> None:
    x = torch.randn(4, 4, device=DEVICE)
    torch.accelerator.synchronize()
    host.native.take_counts()
    y = torch.nn.functional.layer_norm(x @ x, (4,)).softmax(-1).sum()
    (y + x.argmax()).cumsum(0)
    assert host.native.take_counts() == {}
    x.nonzero()
    assert host.native.take_counts() == {"drain of aten::nonzero": 1}
