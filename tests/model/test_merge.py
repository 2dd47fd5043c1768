"""Adapters merged into their base, tensor by tensor: PEFT's own result, and never a model in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain.config.adaptation import Adaptation, LoraChoice
from megatrain.errors import ModelError
from megatrain.model.adapters.adapt import adapt
from megatrain.model.adapters.merge import write_model_of
from tests.families import FAMILIES
from tests.reference import assert_same_bits, make_model

peft = pytest.importorskip("peft")


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    files = directory.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def save_adapter(family: str, root: Path, **lora: Any) -> Any:
    """Save a base and adapters with random values; return PEFT's model of both."""
    make_model(FAMILIES[family]()).save_pretrained(root / "base")
    model = AutoModelForCausalLM.from_pretrained(root / "base")
    adapt(model, Adaptation(lora=LoraChoice(**{"r": 4, "alpha": 8.0, **lora})))
    wrapped = model.__dict__["_megatrain_adapter"]
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) / 8)
    whole = wrapped.peft_config["default"].modules_to_save or ()
    state = wrapped.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(root / "adapter", save_embedding_layers=False)
    file = root / "adapter/adapter_model.safetensors"
    kept = load_file(file) | {
        f"base_model.model.{path}.weight": state[f"base_model.model.{path}.weight"].clone() for path in whole
    }
    save_file(kept, file)
    return wrapped


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"dora": True}),
    ("gpt2", {"rslora": True}),
    ("mixtral", {}),
    ("deepseek_v3", {}),
    ("llama_tied", {"modules_to_save": ("lm_head",)}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "lora"), CASES, ids=lambda value: str(value))
def test_merged_equals_peft_s(family: str, lora: dict[str, Any], tmp_path: Path) -> None:
    wrapped = save_adapter(family, tmp_path, **lora)
    write_model_of(tmp_path / "adapter", tmp_path / "ours", max_shard_bytes=60_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    wrapped.peft_config["default"].modules_to_save = None
    wrapped.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_same_bits(ours[name], tensor, name)
    base = tensors_of(tmp_path / "base")
    assert any(not torch.equal(tensor, base[name]) for name, tensor in ours.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def test_a_base_in_bf16_is_added_to_in_fp32_and_rounded_once(tmp_path: Path) -> None:
    save_adapter("llama", tmp_path, target_modules=("q_proj",))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    write_model_of(tmp_path / "adapter", tmp_path / "ours", max_shard_bytes=1 << 30)
    found, base = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "base")
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    name = "model.layers.2.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    expected = (base[f"{name}.weight"].float() + (b @ a) * 2.0).bfloat16()
    assert_same_bits(found[f"{name}.weight"], expected, name)
    others = [key for key in base if "q_proj.weight" not in key]
    assert len(others) == len(base) - 4
    for key in others:
        assert_same_bits(found[key], base[key], key)
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_without_a_base_is_refused(tmp_path: Path) -> None:
    save_adapter("llama", tmp_path)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="names no base"):
        write_model_of(tmp_path / "adapter", tmp_path / "ours", max_shard_bytes=1 << 30)


MERGE = """
import sys, threading, time
from pathlib import Path
from megatrain.model.adapters.merge import write_model_of
root, highest, is_done = Path(sys.argv[1]), 0, False

def taken():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

def watch():
    global highest
    while not is_done:
        highest = max(highest, taken())
        time.sleep(0.001)

write_model_of(root / "small/adapter", root / "small/out", max_shard_bytes=1 << 30)  # loads what loads late
before, thread = taken(), threading.Thread(target=watch)
thread.start()
write_model_of(root / "large/adapter", root / "large/out", max_shard_bytes=1 << 30)
is_done = True
thread.join()
print(highest - before)
"""


@pytest.mark.parity
def test_merging_takes_no_room_for_a_model(tmp_path: Path) -> None:
    """Memory of its own, that is: what is mapped of files is the system's to take back."""
    for name, width in (("small", 64), ("large", 512)):
        root = tmp_path / name
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=12,
            num_attention_heads=4,
            tie_word_embeddings=False,
        )
        make_model(config).save_pretrained(root / "base", max_shard_size="40MB")
        model = AutoModelForCausalLM.from_pretrained(root / "base")
        adapt(model, Adaptation(lora=LoraChoice(r=4, alpha=8.0)))
        model.__dict__["_megatrain_adapter"].save_pretrained(root / "adapter")
    weights = sum(file.stat().st_size for file in (tmp_path / "large/base").glob("*.safetensors"))
    done = subprocess.run([sys.executable, "-c", MERGE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) < weights / 4
    assert len(tensors_of(tmp_path / "large/out")) == len(tensors_of(tmp_path / "large/base"))
