"""Rows in tiles on the test device: the bits of the resident model in tiles there, with copies delayed."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.model.blocks import find_blocks
from megatrain.model.tiles.position_wise import tile
from tests.expert_families import APART
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.host_device.on_device.resident import ResidentOnDevice
from tests.products import pairwise_rows
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_gradients, assert_same_masters
from tests.tiles import note_calls

host = register()
TILE = 7
"""Tokens; rows have 16: a last tile is shorter."""

ROWS = pairwise_rows(
    {
        "family": ["llama", "qwen3", "gemma2", "mixtral", "olmo2"],
        "activations": ["keep_attention", "recompute", "offload", "keep", "recompute_cheap"],
        "boundaries": ["host", "device"],
        "lockstep": [3, 1],
        "resident_layers": [0, 1],
        "fused": [True, False],
        "precision": ["fp32", "bf16"],
    }
)


@pytest.mark.parametrize(
    "row",
    [*ROWS[::9], *(pytest.param(row, marks=pytest.mark.parity) for n, row in enumerate(ROWS) if n % 9)],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_tiles_equal_a_resident_model_in_tiles(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dict(row)
    family, precision = settings.pop("family"), settings.pop("precision")
    host.native.delay(3, 0.1, 3e-4, 1e-4)
    host.native.fuse_attention(settings.pop("fused"))
    try:
        model = make_model({**FAMILIES, **APART}[family]())
        reference = ResidentOnDevice(model, precision=precision, **HYPER)
        layers = [block.module for block in find_blocks(reference.there) if block.module is not None]
        tile(reference.there, layers, TILE)
        engine = attach_plainly(
            model, device=TYPE, precision=precision, tile_tokens=TILE, num_micro_batches=3, **settings
        )
        engine.arrangement.offloaded._min_bytes = 1
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
        calls = note_calls(monkeypatch)
        for step in range(2):
            batches = make_batches(3, seed=step)
            expected = reference.forward_backward(batches, [1, 2, 3])
            assert_same_bits(
                engine.forward_backward(batches, seeds=[1, 2, 3]).cpu(), expected, f"loss {step}"
            )
            assert_same_gradients(engine, reference.sums)
            reference.step(optimizer.step().grad_norm, 0.5)
        assert_same_masters(engine, reference)
        assert len(calls) >= 2 * 2 * 3 * 3  # resident and streamed, steps, micro-batches, modules at least
        engine.lanes.close()
    finally:
        host.native.fuse_attention(False)
