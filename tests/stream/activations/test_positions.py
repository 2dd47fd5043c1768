"""The angles of a row's positions are there once, however many layers turn by them, and computed in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import megatrain
from megatrain.config.policies import POLICIES
from megatrain.config.rope import YARN
from megatrain.model.profile.count import count_anatomy
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.engine import Engine
from megatrain.stream.forward.layer_visit import LayerVisit
from tests.families import FAMILIES, NUM_BLOCKS
from tests.reference import attach_plainly, make_batches, make_model

TOKENS = 256
"""With which the tables are as large as what leaves the device, with heads of 16 numbers."""


class Watched:
    """The tables that a model's rotary embeddings make, what leaves the device, and what autograd keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.tables: list[Tensor] = []
        self.left: list[int] = []
        self.offloaded: OffloadedActivations | None = None
        self.kept: list[Tensor] = []
        save, pack = OffloadedActivations.save, LayerVisit._pack

        def saved(offloaded: OffloadedActivations, tensor: Tensor, key: Any) -> Any:
            held, self.offloaded = save(offloaded, tensor, key), offloaded
            if held.visit is not None:
                self.left.append(tensor.untyped_storage().data_ptr())
            return held

        def packed(visit: LayerVisit, tensor: Tensor) -> Any:
            found = pack(visit, tensor)
            if isinstance(found, Tensor):
                self.kept.append(found)
            return found

        monkeypatch.setattr(OffloadedActivations, "save", saved)
        monkeypatch.setattr(LayerVisit, "_pack", packed)
        for name, module in engine.model.named_modules():
            if name.endswith("rotary_emb"):
                module.register_forward_hook(lambda _, __, found: self.tables.extend(found))

    @property
    def storages(self) -> set[int]:
        """The storages of the tables, which the list keeps from being used again."""
        return {table.untyped_storage().data_ptr() for table in self.tables}

    def copies(self) -> Iterator[int]:
        """Yield the storages of what is kept and holds the angles of a table."""
        for table in self.tables:
            for tensor in self.kept:
                is_like = tensor.numel() == table.numel() and tensor.dtype == table.dtype
                if is_like and torch.equal(tensor.reshape(-1), table.reshape(-1)):
                    yield tensor.untyped_storage().data_ptr()


def attached(family: str, **settings: Any) -> Engine:
    config = FAMILIES[family]()
    config.max_position_embeddings = TOKENS
    return attach_plainly(make_model(config), device="checked", **settings)


@pytest.mark.parametrize(
    ("family", "kinds", "boundaries", "policy"),
    [
        *(("qwen3", 1, "device", policy) for policy in POLICIES),
        ("qwen3", 1, "host", "recompute"),
        ("qwen3", 1, "host", "drop_boundary"),
        ("gemma3_text", 2, "device", "keep"),
        ("gemma3_text", 2, "device", "offload"),
    ],
)
def test_angles_are_kept_once_and_never_leave_the_device(
    monkeypatch: pytest.MonkeyPatch, family: str, kinds: int, boundaries: str, policy: str
) -> None:
    engine = attached(family, activations=policy, boundaries=boundaries)
    watched = Watched(monkeypatch, engine)
    engine.forward_backward(make_batches(1, rows=1, tokens=TOKENS))
    assert len(watched.tables) == 2 * kinds, "cosines and sines are made once, also for what runs again"
    assert not watched.storages & set(watched.left)
    copies = list(watched.copies())
    assert set(copies) <= watched.storages
    if policy in ("keep", "offload"):
        assert set(copies) == watched.storages
        assert len(copies) >= 2 * NUM_BLOCKS, "every layer saves them, and all of them the same"
        assert bool(watched.left) == (policy == "offload")
    else:
        assert not copies
    engine.detach()


def test_each_micro_batch_of_a_round_has_its_angles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = attached("qwen3", activations="offload", lockstep=3, num_micro_batches=3)
    watched = Watched(monkeypatch, engine)
    engine.forward_backward(make_batches(3, rows=1, tokens=TOKENS))
    assert len(watched.tables) == len(watched.storages) == 2 * 3
    assert not watched.storages & set(watched.left)
    assert set(watched.copies()) == watched.storages
    engine.detach()


def test_bytes_that_leave_are_the_plan_s_without_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = attached("qwen3", activations="offload")
    watched = Watched(monkeypatch, engine)
    engine.forward_backward(make_batches(1, rows=1, tokens=TOKENS))
    assert watched.offloaded is not None
    config = engine.model.config
    engine.detach()
    counted = count_anatomy(
        config,
        micro_batch_size=1,
        seq_len=TOKENS,
        precision="fp32",
        attn_implementation=None,
        device_type="cpu",
    )
    # the backward of the last layer comes before its tensors are dropped
    leaving = [layer.offload_copied_bytes for layer in counted.layers[:-1]]
    assert watched.offloaded.saved_bytes == sum(leaving) == 3 * 786_432


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": YARN, "factor": 4}])
def test_angles_at_large_positions_are_computed_in_fp32(
    precision: str, scaling: dict[str, Any] | None
) -> None:
    """Also beyond 2^24, from where on fp32 has no odd numbers, they are those of transformers."""
    model = megatrain.load(config=FAMILIES["qwen3"](), precision=precision, rope_scaling=scaling).train()
    engine = attach_plainly(model, precision=precision, device="checked")
    rotary: Any = model.model.rotary_emb
    frequencies = rotary.inv_freq
    assert frequencies.dtype == torch.float32
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    positions = torch.tensor([[0, 1, 257, 65_537, 1_000_001, 2**24 - 1, 2**24 + 2, 2**30 + 2**7]])
    found = rotary(torch.zeros(1, 1, 1, dtype=dtype), positions)
    angles = positions[0, :, None].float() * frequencies[None]
    exact = positions[0, :, None].double() * frequencies.double()[None]
    assert ((angles.double() - exact).abs() <= exact * 2**-24).all(), (
        "one rounding, of a product of exact numbers"
    )
    for table, function in zip(found, (torch.cos, torch.sin), strict=True):
        assert table.dtype == dtype
        half = table[0, :, : frequencies.numel()]
        expected = function(angles) * rotary.attention_scaling
        torch.testing.assert_close(
            half, expected.to(dtype), rtol=0, atol=2e-7 if dtype == torch.float32 else 0
        )
    engine.detach()
