"""A base that is kept in codes, decoded on a device: the bits of its values, in the planned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config.adaptation import AS_STORED, DEQUANTISED
from megatrain.layout.decoding import decoding_scratch
from megatrain.layout.encoding import Scratch
from megatrain.model.weights.encoding import scratch_of
from megatrain.model.weights.quantised.fp8 import Fp8Encoding
from megatrain.model.weights.quantised.mxfp4 import Mxfp4Encoding
from tests.host_device.device import TYPE, register
from tests.model.weights.quantised.test_checkpoints import write
from tests.reference import attach_plainly
from tests.stream.execute.test_codes import assert_same, loaded, trained

host = register()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["mxfp4", "fp8 experts"])
@pytest.mark.parametrize("resident_layers", [0, 1])
def test_codes_train_as_their_values_do(kind: str, resident_layers: int, tmp_path: Path) -> None:
    """With streams that are slow at random: a decoding that did not wait for its codes would be seen."""
    place = write(kind, tmp_path)
    settings: dict[str, Any] = {"precision": "bf16", "fragments": True}
    results = []
    for base in (DEQUANTISED, AS_STORED):
        model = loaded(place, base, **settings)
        host.native.delay(3, 0.1, 3e-4, 1e-4)
        try:
            engine = attach_plainly(
                model,
                device=TYPE,
                lockstep=2,
                num_micro_batches=2,
                resident_layers=resident_layers,
                **settings,
            )
            results.append(trained(engine))
        finally:
            host.native.delay(0, 0.0, 0.0, 0.0)
        engine.detach()
    assert_same(results[1], results[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "encoding",
    [
        Mxfp4Encoding((2, 1024, 96)),
        Fp8Encoding((2, 96, 1000), (128, 128), torch.float8_e4m3fn),
        Fp8Encoding((512, 1024), (16, 128), torch.float8_e5m2),
        Fp8Encoding((512, 30), (1, 30), torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 40, 1000])
def test_decoding_takes_no_memory_but_its_scratch(
    encoding: Mxfp4Encoding | Fp8Encoding, dtype: torch.dtype, rows: int
) -> None:
    """In pieces of any size, with the bits of the CPU's."""
    raw = torch.randint(0, 120, (encoding.nbytes,), dtype=torch.uint8)
    parts = encoding.views(raw)
    if "scales" in parts and parts["scales"].dtype == torch.float32:
        parts["scales"].uniform_(0.1, 3)
    expected = torch.empty(encoding.shape, dtype=dtype)
    encoding.decode(parts, expected, scratch_of(expected))
    there, out = encoding.views(raw.to(TYPE)), torch.empty(encoding.shape, dtype=dtype, device=TYPE)
    numel = rows * encoding.shape[-2 if isinstance(encoding, Mxfp4Encoding) else -1]
    scratch = torch.empty(decoding_scratch(numel), dtype=torch.uint8, device=TYPE)
    encoding.prepare(out.device)
    before = host.memory_allocated()
    host.reset_peak_memory_stats()
    encoding.decode(there, out, Scratch(scratch))
    assert host.max_memory_allocated() == before
    assert torch.equal(out.cpu(), expected)
