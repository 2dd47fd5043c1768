"""Quantised checkpoints are refused with lines that make a copy, and the copy is the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PretrainedConfig

from megatrain.errors import ModelError
from megatrain.model.weights.skeleton import read_config
from tests.hf.setups import tokenizer
from tests.model.resident import load_bound

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def mxfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the experts weights in blocks of 32 values of 4 bits and a scale, as the official files have."""
    made: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = value
            continue
        experts, wide, narrow = value.shape
        shape = (experts, narrow, wide // 32)
        made[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        made[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)
    return made


def fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give every projection weights of 8 bits and one scale."""
    made: dict[str, Tensor] = {}
    for name, value in tensors.items():
        is_quantised = "_proj.weight" in name
        made[name] = (16 * value.float()).to(torch.float8_e4m3fn) if is_quantised else value
        if is_quantised:
            made[f"{name}_scale_inv"] = torch.full((1, 1), 1 / 16)
    return made


QUANTISED: dict[str, tuple[PretrainedConfig, Callable[[dict[str, Tensor]], dict[str, Tensor]], object]] = {
    "mxfp4": (
        GptOssConfig(
            **SMALL,
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            architectures=["GptOssForCausalLM"],
        ),
        mxfp4,
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
    ),
    "fp8": (
        LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]),
        fp8,
        {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
}


@pytest.mark.filterwarnings("ignore")  # of transformers, on what this CPU could do better
@pytest.mark.parametrize("method", QUANTISED)
def test_the_lines_that_a_refusal_names_make_a_copy_that_is_the_model(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, quantise, more = QUANTISED[method]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("quantised")
    tokenizer().save_pretrained("quantised")
    tensors = quantise(load_file("quantised/model.safetensors"))
    save_file(tensors, "quantised/model.safetensors", metadata={"format": "pt"})
    values = json.loads(Path("quantised/config.json").read_text())
    values["quantization_config"] = {"quant_method": method, **more}  # type: ignore[dict-item]
    Path("quantised/config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError) as caught:
        read_config("quantised")
    text = str(caught.value)
    assert text.startswith(f"quantised: config.json has a quantization_config ({method}), and exact training")
    _, _, lines = text.partition("which this makes: ")
    assert "\n" not in text
    kind = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}[method]
    exec(lines, {})
    as_bf16 = getattr(transformers, kind)(dequantize=True)
    options = {"dtype": "bfloat16", "quantization_config": as_bf16}
    whole = AutoModelForCausalLM.from_pretrained("quantised", **options)
    copied, _ = load_bound(Path("DIR"), read_config("DIR"), torch.bfloat16)
    expected = dict(whole.named_parameters())
    assert {name for name, _ in copied.named_parameters()} == expected.keys()
    for name, value in copied.named_parameters():
        assert torch.equal(value, expected[name]), name
    assert Path("DIR/tokenizer.json").exists()


@pytest.mark.parametrize("method", ["gptq", None])
def test_other_quantised_checkpoints_are_refused_without_lines(method: str | None, tmp_path: Path) -> None:
    quantised = {"bits": 4} if method is None else {"quant_method": method}
    values = {"model_type": "llama", "quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"give the checkpoint that was quantised, or a copy in bf16$"):
        read_config(tmp_path)
