"""What a step says of the device's memory."""

from __future__ import annotations

from typing import Any

import torch

from megatrain.stream.forward import attention
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER

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
