"""What a step says of the device's memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatrain.stream import machine
from megatrain.stream.forward import attention
from megatrain.stream.lanes import accelerator
from megatrain.stream.ranks.own_gradients import OwnGradients
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, check_parity

host = register()


def test_a_step_counts_what_the_allocator_had_to_give_back() -> None:
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=TYPE)
    optimizer = engine.adamw(**HYPER)
    module: Any = host
    held = module.num_alloc_retries
    try:
        for again in (0, 3):
            module.num_alloc_retries += again
            engine.forward_backward(make_batches(1))
            module.num_alloc_retries += again
            optimizer.step()
            engine.sync()
            report = engine.last_step
            assert report.allocator_retries == again, "those within the step"
            assert report.unused_device_bytes > 0
    finally:
        module.num_alloc_retries = held
    engine.detach()


@pytest.mark.parametrize(
    ("dtype", "wide", "nbytes"),
    [("bfloat16", "float64", 8), ("bfloat16", "float32", 0), ("float32", "float64", 8)],
)
@pytest.mark.parametrize("name", ["norm", "sum"])
def test_a_reduction_takes_the_memory_that_it_takes_on_cuda(
    name: str, dtype: str, wide: str, nbytes: int
) -> None:
    values = torch.ones(1 << 20, dtype=getattr(torch, dtype), device=TYPE)
    host.reset_peak_memory_stats()
    before = host.memory_allocated()
    reduce: Any = torch.linalg.vector_norm if name == "norm" else torch.sum
    found = reduce(values, dtype=getattr(torch, wide))
    assert 0 <= host.max_memory_allocated() - before - (nbytes << 20) <= 1024
    assert float(found) == (1 << 10 if name == "norm" else 1 << 20)


def norm_of_all(flats: Any, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """Square as torch's norm does."""
    out.copy_(sum(torch.linalg.vector_norm(flat, dtype=torch.float64).square() for flat in flats))


def rounded_at_once(self: OwnGradients, sums: torch.Tensor, place: torch.Tensor) -> Any:
    """Round all of a sum into memory of its own."""
    rounded = sums.to(place.dtype)
    self._lanes.copy(place, rounded)
    yield rounded


@pytest.mark.parametrize("fault", ["a norm in memory of its own", "rounding in memory of its own", "none"])
def test_an_allocation_in_a_lane_that_copies_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault.startswith("a norm"):
        monkeypatch.setattr(accelerator, "squares_on_device", norm_of_all)
    elif fault.startswith("rounding"):
        monkeypatch.setattr(OwnGradients, "_sent", rounded_at_once)
    engine = attach_plainly(
        make_model(FAMILIES["llama_tied"](), dtype=torch.bfloat16),
        device=TYPE,
        precision="bf16",
        num_micro_batches=2,
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=1.0)
    with (
        nullcontext()
        if fault == "none"
        else pytest.raises(RuntimeError, match=r"a lane that copies allocates")
    ):
        engine.forward_backward(make_batches(2))
        optimizer.step()
        engine.sync()
    engine.lanes.close()


def test_products_are_in_full_while_a_model_is_attached(monkeypatch: Any) -> None:
    seen: list[torch.device] = []
    inner = attention.in_full

    def note(device: torch.device) -> Any:
        seen.append(device)
        return inner(device)

    monkeypatch.setattr(attention, "in_full", note)
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=TYPE)
    assert [device.type for device in seen] == [TYPE]
    engine.detach()


def test_the_rate_of_the_host_s_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates and copies share it: a plan that assumes a desktop's is far too slow on a server."""
    monkeypatch.setattr(machine, "measure_matmul_peak", lambda *_: 1e12)
    monkeypatch.setattr(machine, "memory_rate", lambda *_, **__: 123e9)
    spec = machine.common_gpu(torch.device(TYPE, 0), "fp32")
    assert spec.host_bytes_per_s == 123e9
    assert spec.sources["memory"] == "measured"


def test_state_on_the_device_alone_changes_no_bit() -> None:
    """Nothing of it is locked, and what the lanes copy is counted as on any device."""
    check_parity("llama", device=TYPE, resident_layers=2, mirror_resident=False, num_micro_batches=2)
    check_parity("mixtral", device=TYPE, resident_layers=4, mirror_resident=False, lockstep=2)
