"""A base that stays in the codes of its checkpoint: the bits of the same base in values, in fewer bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config

import megatrain
from megatrain.config.adaptation import AS_STORED, DEQUANTISED, Adaptation, LoraChoice
from megatrain.layout import pools
from megatrain.stream.engine import Engine
from megatrain.stream.execute.codes import Codes
from megatrain.stream.lanes import Lanes
from tests.model.weights.quantised.test_checkpoints import SMALL, write
from tests.products import every_value
from tests.reference import assert_same_bits, attach_plainly, make_batches

pytest.importorskip("peft")

QWEN3 = Qwen3Config(**SMALL, head_dim=16, architectures=["Qwen3ForCausalLM"])
KINDS: dict[str, tuple[str, PretrainedConfig | None]] = {
    "gpt_oss": ("mxfp4", None),
    "deepseek_v3": ("fp8 experts", None),
    "qwen3": ("fp8", QWEN3),
    "ragged": ("fp8 ragged", None),
}
LORA = LoraChoice(r=4, alpha=8.0)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny quantised checkpoint of every kind."""
    root = tmp_path_factory.mktemp("quantised")
    return {name: write(kind, root / name, config) for name, (kind, config) in KINDS.items()}


def loaded(place: Path, base: str, *, lora: LoraChoice = LORA, **settings: Any) -> PreTrainedModel:
    return megatrain.load(place, adaptation=Adaptation(lora=lora, base=base), **settings).train()


def trained(engine: Engine, steps: int = 3) -> dict[str, Tensor]:
    """Train a few steps; return every loss, gradient and master."""
    optimizer, found = engine.adamw(lr=1e-2), {}
    for step in range(steps):
        batches, seeds = make_batches(2, seed=step, padded=True), [2 * step, 2 * step + 1]
        found[f"loss {step}"] = engine.forward_backward(batches, seeds=seeds)
        found |= {f"{name} {step}": gradient.clone() for name, gradient in engine.named_gradients()}
        optimizer.step()
    return found | dict(engine.named_masters())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert any(".lora_A." in name for name in found)
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


@every_value(
    kind=list(KINDS),
    precision=["fp32", "bf16"],
    device=["cpu", "checked", "emulated"],
    fragments=[False, True],
    lockstep=[1, 2],
    resident_layers=[0, 1, 2],
    activations=["recompute", "keep", "offload"],
    outer_streams=[False, True],
)
def test_codes_train_as_their_values_do(
    kind: str,
    precision: str,
    device: str,
    fragments: bool,
    lockstep: int,
    resident_layers: int,
    activations: str,
    outer_streams: bool,
    places: dict[str, Path],
) -> None:
    settings: dict[str, Any] = {
        "device": device,
        "lockstep": lockstep,
        "resident_layers": resident_layers,
        "activations": activations,
        "outer_streams": outer_streams and resident_layers < 2,
        "num_micro_batches": 2,
    }
    results = []
    for base in (DEQUANTISED, AS_STORED):
        model = loaded(places[kind], base, precision=precision, fragments=fragments)
        engine = attach_plainly(model, precision=precision, fragments=fragments, **settings)
        results.append(trained(engine))
        engine.detach()
    assert_same(results[1], results[0])


def test_layers_become_resident_and_stream_again_between_steps(places: dict[str, Path]) -> None:
    found = []
    for base in (DEQUANTISED, AS_STORED):
        engine = attach_plainly(loaded(places["gpt_oss"], base), device="checked", num_micro_batches=2)
        optimizer, losses = engine.adamw(lr=1e-2), {}
        for step, resident_layers in enumerate((0, 2, 1, 0)):
            engine.reconfigure(replace(engine.choice, resident_layers=resident_layers))
            losses[f"loss {step}"] = engine.forward_backward(make_batches(2, seed=step))
            optimizer.step()
        found.append(losses | dict(engine.named_masters()))
    assert_same(found[1], found[0])


def test_dora_begins_with_the_norms_of_the_values(places: dict[str, Path]) -> None:
    lora = LoraChoice(r=4, alpha=8.0, dora=True, target_modules=("q_proj", "down_proj"))
    found = [
        trained(attach_plainly(loaded(places["qwen3"], base, lora=lora), num_micro_batches=2), steps=1)
        for base in (DEQUANTISED, AS_STORED)
    ]
    assert any("lora_magnitude" in name for name in found[0])
    assert_same(found[1], found[0])


def test_a_module_that_is_trained_whole_has_values(places: dict[str, Path]) -> None:
    lora = LoraChoice(r=4, alpha=8.0, target_modules=("q_proj",), modules_to_save=("o_proj",))
    found = []
    for base in (DEQUANTISED, AS_STORED):
        model = loaded(places["qwen3"], base, lora=lora)
        engine = attach_plainly(model, num_micro_batches=2)
        kept = [entry.name for layout in engine.host.layouts for entry in layout.encoded]
        assert any("up_proj" in name for name in kept) is (base == AS_STORED)
        assert not any("o_proj" in name for name in kept)
        found.append(trained(engine))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_passes_without_gradients_are_the_same(kind: str, places: dict[str, Path]) -> None:
    found = []
    for base in (DEQUANTISED, AS_STORED):
        engine = attach_plainly(loaded(places[kind], base).eval())
        batch = make_batches(1)[0]
        with torch.inference_mode():
            logits = engine.model(input_ids=batch["input_ids"]).logits.clone()
        made = engine.model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        found.append((logits, made))
    assert_same_bits(found[1][0], found[0][0], "logits")
    assert torch.equal(found[1][1], found[0][1])


def test_a_fetch_copies_the_codes_and_the_program_says_how_many(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte that crosses to the device: those of weights that are not encoded, and of codes."""
    engine = attach_plainly(loaded(places["deepseek_v3"], AS_STORED), num_slots=1)
    copied: list[int] = []
    inner = Lanes.copy

    def copy(self: Lanes, target: Tensor, source: Tensor) -> None:
        copied.append(source.nbytes)
        inner(self, target, source)

    monkeypatch.setattr(Lanes, "copy", copy)
    with torch.no_grad():
        engine.model(**make_batches(1)[0])
    layouts = engine.host.layouts
    parts = [(layout.plain_bytes, layout.sizes.codes_bytes) for layout in layouts]
    assert sorted(copied) == sorted(n for both in parts for n in both if n)
    assert engine.counts.fetch_bytes == sum(copied) == sum(layout.kept_bytes for layout in layouts)
    assert sum(copied) < 0.7 * sum(layout.working_bytes for layout in layouts)


def test_codes_pass_a_buffer_for_the_largest_block(places: dict[str, Path]) -> None:
    engine = attach_plainly(loaded(places["gpt_oss"], AS_STORED), num_slots=2, device="checked")
    codes: Codes = engine.arrangement.slots.codes
    sizes = [layout.sizes for layout in engine.host.layouts]
    assert codes._buffer.nbytes == max(map(pools.codes, sizes)) > 0
    assert engine.host.plane_bytes["working"] == sum(map(pools.working_plane, sizes))
    assert engine.host.plane_bytes["working"] < sum(size.working_bytes for size in sizes)
