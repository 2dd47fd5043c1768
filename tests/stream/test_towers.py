"""Models with a second list of layers: a tower beside the language model, large enough to stream."""

from __future__ import annotations

import pytest
import torch

import megatrain
from megatrain.model.blocks import find_blocks, group_layers
from megatrain.model.documents.apart import why_not_apart
from megatrain.model.profile.count import count_model
from megatrain.model.weights.parts import freeze_beside_text
from tests.model.weights.test_parts import IMAGES_AND_TEXT, gemma3
from tests.reference import Batch, Resident, assert_same_bits, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_gradients

TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def with_images(batch: Batch, seed: int) -> Batch:
    """Put an image of four tokens into each row."""
    ids = batch["input_ids"] % 120 + 3
    ids[:, 1:7] = torch.tensor([126, 125, 125, 125, 125, 127])
    pixels = torch.randn(len(ids), 3, 28, 28, generator=torch.Generator().manual_seed(seed))
    labels = ids.masked_fill(ids >= 125, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "token_type_ids": (ids == 125).long()}


def test_a_second_list_of_layers_streams_by_default() -> None:
    """Rows of text pass the language model's layers, rows with images all: both as the resident model."""
    model = make_model(gemma3(**TOWER))
    layers = group_layers(find_blocks(model))
    assert len(layers) == 4 + TOWER["num_hidden_layers"]
    reference = Resident(model, **HYPER)
    engine = megatrain.attach(model)
    assert len(engine.choice.policies) == len(layers)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None)
    for step in range(4):
        batches = make_batches(2, seed=step)
        if step in (1, 2):
            batches = [with_images(batch, step) for batch in batches]
        else:
            batches = [{**batch, "token_type_ids": 0 * batch["input_ids"]} for batch in batches]
        expected = reference.forward_backward(batches)
        assert_same_bits(engine.forward_backward(batches), expected, f"loss of step {step}")
        assert_same_gradients(engine, reference.sums, f"in step {step}")
        reference.step(optimizer.step().grad_norm, None)
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), reference.master(name), name)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", IMAGES_AND_TEXT)
def test_models_for_images_train_on_text_with_towers_frozen(kind: str, is_packed: bool) -> None:
    """Three steps to the resident model's bits; the tower keeps its own."""
    model = make_model(IMAGES_AND_TEXT[kind]())
    if is_packed and why_not_apart(model.config):
        pytest.skip(f"{kind}: documents in a row would see each other")
    freeze_beside_text(model)
    tower = {
        name: value.detach().clone() for name, value in model.named_parameters() if not value.requires_grad
    }
    assert len(tower) > 20
    reference = Resident(model, **HYPER)
    engine = megatrain.attach(model)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None)
    for step in range(3):
        batches = make_batches(2, seed=step)
        for batch in batches:
            batch["input_ids"] %= 120  # type: ignore[index]
        if is_packed:
            positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16)
            batches = [{**batch, "position_ids": positions, "use_cache": False} for batch in batches]
        expected = reference.forward_backward(batches)
        assert_same_bits(engine.forward_backward(batches), expected, f"loss of step {step}")
        assert_same_gradients(engine, reference.sums, f"in step {step}")
        reference.step(optimizer.step().grad_norm, None)
    for name, parameter in model.named_parameters():
        is_frozen = name in tower
        assert_same_bits(parameter.detach(), tower[name] if is_frozen else reference.master(name), name)


def test_documents_of_models_for_images_are_tried_and_not_read_from_their_code() -> None:
    """Of three positions of a token Qwen2.5-VL makes no documents, and nothing in its code says so."""
    found = {kind: why_not_apart(make()) for kind, make in IMAGES_AND_TEXT.items()}
    assert found.pop("qwen2_5_vl") == (
        "in the qwen2_5_vl model tokens see those of other documents in their row"
    )
    assert "carry a state from token to token" in str(found.pop("qwen3_5"))
    assert found == dict.fromkeys(("qwen3_vl", "mistral3", "llava"))


def test_layers_of_the_language_model_stream_however_large_a_tower_is() -> None:
    model = make_model(gemma3(**{**TOWER, "hidden_size": 256, "intermediate_size": 1024}))
    layers = [block for block in find_blocks(model) if block.is_streamed]
    sizes = [sum(value.numel() for value in block.parameters.values()) for block in layers]
    assert sum(sizes[:4]) < 0.05 * sum(sizes)
    assert [block.is_beside for block in layers] == [False] * 4 + [True] * 3


def test_layers_that_text_does_not_pass_are_counted_by_their_size_alone() -> None:
    model = make_model(gemma3(**TOWER))
    anatomy = count_model(model, micro_batch_size=1, seq_len=16, precision="fp32", device_type="cpu")
    blocks = find_blocks(model)
    assert [layer.fragments[0].name.split(".layers")[0] for layer in anatomy.layers] == [
        "model.language_model"
    ] * 4 + ["model.vision_tower.encoder"] * 3
    assert [layer.num_params for layer in anatomy.layers] == [
        sum(parameter.numel() for parameter in block.parameters.values()) for block in blocks[:7]
    ]
    text, tower = anatomy.layers[:4], anatomy.layers[4:]
    assert all(layer.forward.matmul_flops > 0 and layer.saved_bytes["keep"] > 0 for layer in text)
    assert all(layer.forward.matmul_flops == layer.saved_bytes["keep"] == 0 for layer in tower)
    of_text = sum(p.numel() for p in model.model.language_model.parameters())
    assert (
        anatomy.num_active_params
        == of_text
        < anatomy.num_params
        == sum(p.numel() for p in model.parameters())
    )
