"""Experts in chunks on the test device: bits of the resident model there, whatever copies are delayed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.expert_families import APART
from tests.host_device.device import TYPE, register
from tests.host_device.on_device.resident import ResidentOnDevice
from tests.products import pairwise_rows
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_gradients, assert_same_masters

host = register()

ROWS = pairwise_rows(
    {
        "family": list(APART),
        "activations": ["recompute", "keep", "offload", "recompute_cheap"],
        "boundaries": ["device", "host"],
        "lockstep": [3, 1],
        "resident_layers": [0, 1],
        "gradients": ["host", "device"],
        "precision": ["fp32", "bf16"],
    }
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "row",
    [*ROWS[::6], *(pytest.param(row, marks=pytest.mark.parity) for n, row in enumerate(ROWS) if n % 6)],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_chunks_equal_a_resident_model(row: dict[str, Any]) -> None:
    settings = dict(row)
    family, precision = settings.pop("family"), settings.pop("precision")
    if settings["lockstep"] == 1:
        settings["gradients"] = "host"
    host.native.delay(3, 0.1, 3e-4, 1e-4)
    model = make_model(APART[family]())
    reference = ResidentOnDevice(model, precision=precision, **HYPER)
    engine = attach_plainly(
        model, device=TYPE, precision=precision, expert_chunks=4, num_micro_batches=3, **settings
    )
    engine.arrangement.offloaded._min_bytes = 1
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(2):
        batches = make_batches(3, seed=step)
        expected = reference.forward_backward(batches)
        assert_same_bits(engine.forward_backward(batches).cpu(), expected, f"loss {step}")
        assert_same_gradients(engine, reference.sums)
        reference.step(optimizer.step().grad_norm, 0.5)
    assert_same_masters(engine, reference)
    engine.lanes.close()
