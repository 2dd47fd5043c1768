"""What `megatrain inspect` says of a model, by numbers, and that it reads no weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatrain.cli import main
from megatrain.errors import ModelError
from megatrain.train.commands.inspect_model import inspect_model
from tests.hf.setups import tokenizer
from tests.kinds import tiny_model
from tests.model.resident import random_model
from tests.model.weights.quantised.test_checkpoints import write
from tests.model.weights.test_parts import IMAGES_AND_TEXT


def test_a_quantised_mixture_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write("mxfp4", tmp_path / "model")
    tensors = load_file(place / "model.safetensors")
    found = inspect_model(str(place))
    packed = [value for key, value in tensors.items() if key.endswith("_blocks")]
    others = [value for key, value in tensors.items() if not key.endswith(("_blocks", "_scales"))]
    assert (
        found.num_params
        == found.num_trained
        == sum(v.numel() for v in others) + 2 * sum(v.numel() for v in packed)
    )
    assert (found.model_class, found.num_layers, found.experts) == ("GptOssForCausalLM", 2, (2, 1))
    assert (found.quantisation, found.num_quantised) == ("mxfp4", 4)
    assert found.file_bytes == (place / "model.safetensors").stat().st_size
    assert (found.towers, found.ties, found.untouched, found.context) == ({}, (), (), 64)
    assert found.template.startswith("no tokenizer: ")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(place)])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert (
        "quantised   mxfp4, 4 weights: read in bf16, and exported in train.precision, or as they are with "
        "--format mxfp4" in said
    )
    assert "adapters    lora.target_modules=all-linear puts no adapter on experts (mlp.experts.gate" in said
    with pytest.raises(SystemExit):
        main(["inspect", str(place), "--json"])
    assert json.loads(capsys.readouterr().out)["num_params"] == found.num_params


def test_a_model_for_images_has_a_frozen_tower(tmp_path: Path) -> None:
    model = random_model(IMAGES_AND_TEXT["mistral3"]())
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    found = inspect_model(str(tmp_path))
    tower = sum(value.numel() for value in model.model.vision_tower.parameters())
    projector = sum(value.numel() for value in model.model.multi_modal_projector.parameters())
    assert found.towers == {"model.vision_tower": tower, "model.multi_modal_projector": projector}
    assert found.num_params - found.num_trained == tower + projector
    assert (found.model_class, found.num_layers) == ("Mistral3ForConditionalGeneration", 4)
    text = "\n".join(found.lines())
    assert "frozen      model.vision_tower, " in text
    assert "rows of text do not use them" in text


def test_what_a_class_freezes_itself_is_no_tower(tmp_path: Path) -> None:
    """AFMoE's routers have biases that they correct themselves."""
    tiny_model("afmoe").save_pretrained(tmp_path)
    found = inspect_model(str(tmp_path))
    assert found.towers == {}
    assert found.num_params - found.num_trained == found.fixed["model.layers"] > 0
    assert "parameters of model.layers, which no gradient changes" in "\n".join(found.lines())


def test_a_file_that_is_damaged_is_refused_before_its_weights(tmp_path: Path) -> None:
    place = write("fp8", tmp_path / "model")
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated or no safetensors file"):
        inspect_model(str(place))
