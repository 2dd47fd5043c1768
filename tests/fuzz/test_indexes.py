"""The index and configurations of a stranger's model: any JSON is read or refused, and nothing outside."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from megatrain.model.weights.files import INDEX_NAME, checkpoint_files, read_sources
from megatrain.model.weights.generation import read_generation_config
from megatrain.model.weights.quantised.formats import quantisation_of
from megatrain.model.weights.skeleton import read_config
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_json

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LEADING_OUT = (
    *(
        "../outside.safetensors",
        "/{root}/outside.safetensors",
        "sub/../../outside.safetensors",
        "link.safetensors",
    ),
    *("..\\outside.safetensors", "./outside.safetensors", "outside.safetensors\0.safetensors"),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two files; beside its directory lies a file that it may not have, in it a link to that."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number, name in enumerate(FILES):
        save_file({f"layer{number}.weight": torch.ones(2, 2)}, folder / name)
    save_file({"outside": torch.ones(3)}, tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    return folder


def read_index(model: Path, random: Random) -> None:
    index: dict[str, Any] = {
        "metadata": {"total_size": 32},
        "weight_map": {f"layer{number}.weight": name for number, name in enumerate(FILES)},
    }
    if random.random() < 0.3:
        outside = random.choice(LEADING_OUT).replace("{root}", str(model.parent))
        index["weight_map"][random.choice(("outside", "layer0.weight"))] = outside
    (model / INDEX_NAME).write_bytes(mutated_json(random, index))
    files = checkpoint_files(model)
    assert {file.parent for file in files} == {model}
    sources = read_sources(model, files, None)
    assert "outside" not in sources


@counts(sample=3000, soak=100_000)
def test_any_index_is_read_or_refused(model: Path, num: int) -> None:
    assert attack(num, partial(read_index, model), model) > num // 2


CONFIG = {
    **LlamaConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=2).to_dict(),
    "architectures": ["LlamaForCausalLM"],
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "ignored_layers": ["lm_head"],
    },
}
GENERATION = {"eos_token_id": [1, 2], "temperature": 0.7, "do_sample": True, "max_length": 20}
METHODS = (
    "fp8",
    "mxfp4",
    "bitsandbytes",
    "gptq",
    "awq",
    "compressed-tensors",
    "modelopt",
    "fbgemm_fp8",
    "nothing",
)


def read_configurations(folder: Path, random: Random) -> None:
    config = json.loads(json.dumps(CONFIG))
    if random.random() < 0.5:
        del config["quantization_config"]
    else:
        config["quantization_config"]["quant_method"] = random.choice(METHODS)
    (folder / "config.json").write_bytes(mutated_json(random, config))
    (folder / "generation_config.json").write_bytes(mutated_json(random, GENERATION))
    if random.random() < 0.2:
        read_generation_config(folder)
    quantisation_of(folder)
    read_config(folder)


@pytest.mark.filterwarnings("ignore")  # transformers warns of odd values
@counts(sample=250, soak=20_000)
def test_any_configuration_of_a_model_is_read_or_refused(tmp_path: Path, num: int) -> None:
    assert attack(num, partial(read_configurations, tmp_path), tmp_path) > num // 4
