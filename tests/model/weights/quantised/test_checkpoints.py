"""Quantised checkpoints of real classes: read as transformers reads them, trained, exported in bf16."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

import megatrain
from megatrain.errors import ModelError
from megatrain.model.weights.skeleton import read_config
from tests.families import FAMILIES
from tests.forks import run_script
from tests.model.resident import load_bound
from tests.model.weights.test_files import PEAK_SCRIPT
from tests.reference import make_batches, make_model
from tests.stream.runs import HYPER

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
GPT_OSS = GptOssConfig(
    **SMALL,
    head_dim=16,
    num_local_experts=2,
    num_experts_per_tok=1,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    architectures=["GptOssForCausalLM"],
)
LLAMA = LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"])
DEEPSEEK = DeepseekV3Config(
    **{**SMALL, "num_key_value_heads": 4},
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    architectures=["DeepseekV3ForCausalLM"],
)


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
        made[f"{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
    return made


def fp8(block: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Give every projection codes of 8 bits, and a scale to each block, of which the last may be smaller."""

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, value in tensors.items():
            if "_proj" not in name or not name.endswith("weight") or value.ndim != 2:
                made[name] = value
                continue
            rows, columns = value.shape
            made[name] = (16 * value.float()).to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = torch.rand((-(-rows // block), -(-columns // block))) / 16
        return made

    return quantise


QUANTISED: dict[str, tuple[PretrainedConfig, Callable[..., dict[str, Tensor]], dict[str, Any]]] = {
    "mxfp4": (
        GPT_OSS,
        mxfp4,
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
    ),
    "fp8": (LLAMA, fp8(32), {"weight_block_size": [32, 32], "activation_scheme": "dynamic"}),
    "fp8 experts": (DEEPSEEK, fp8(8), {"weight_block_size": [8, 8], "activation_scheme": "dynamic"}),
    "fp8 ragged": (DEEPSEEK, fp8(20), {"weight_block_size": [20, 20], "activation_scheme": "dynamic"}),
}


def write(kind: str, place: Path, config: PretrainedConfig | None = None) -> Path:
    """Write a checkpoint of a kind, drawn at random: a tiny one, or of a configuration."""
    tiny, quantise, more = QUANTISED[kind]
    return write_quantised(place, config or tiny, quantise, {"quant_method": kind.split()[0], **more})


def write_quantised(
    place: Path,
    config: PretrainedConfig,
    quantise: Callable[..., dict[str, Tensor]],
    settings: dict[str, Any],
) -> Path:
    """Write a checkpoint of a configuration, drawn at random, with its `quantization_config`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
    tensors = quantise(load_file(place / "model.safetensors"))
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((place / "config.json").read_text())
    values["quantization_config"] = settings
    (place / "config.json").write_text(json.dumps(values))
    return place


@pytest.mark.filterwarnings("ignore")  # of transformers, on what this CPU could do better
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "fp8 experts"])
def test_a_checkpoint_is_read_as_transformers_dequantises_it(kind: str, tmp_path: Path) -> None:
    place = write(kind, tmp_path / "model")
    as_bf16 = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}[kind.split()[0]]
    options = {"dtype": "bfloat16", "quantization_config": getattr(transformers, as_bf16)(dequantize=True)}
    expected = dict(AutoModelForCausalLM.from_pretrained(place, **options).named_parameters())
    found, _ = load_bound(place, read_config(place), torch.bfloat16)
    assert {name for name, _ in found.named_parameters()} == expected.keys()
    for name, value in found.named_parameters():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_checkpoint_trains_and_is_exported_in_bf16(kind: str, tmp_path: Path) -> None:
    """The values that were read are the masters; an export that was not trained has them again."""
    place, out = write(kind, tmp_path / "model"), tmp_path / "out"
    read, _ = load_bound(place, read_config(place), torch.bfloat16)
    before = {name: value.detach().clone() for name, value in read.named_parameters()}
    model = megatrain.load(place, precision="bf16")
    engine = megatrain.attach(model, device="cpu")
    for name, master in engine.named_masters():
        assert torch.equal(master, before[name].float()), name
    untrained = export(engine.model, engine, tmp_path / "untrained")
    assert untrained.keys() == before.keys()
    assert [name for name, value in untrained.items() if not torch.equal(value, before[name])] == []
    optimizer = engine.adamw(**HYPER)
    losses = []
    for _ in range(3):
        losses.append(float(engine.forward_backward(make_batches(2, seed=0))))
        optimizer.step()
    assert losses[2] < losses[0]
    trained = export(engine.model, engine, out)
    assert any(not torch.equal(value, before[name]) for name, value in trained.items())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert not [key for key in load_file(out / "model.safetensors") if "scale" in key or "blocks" in key]


def export(model: PreTrainedModel, engine: Any, out: Path) -> dict[str, Tensor]:
    """Save a streamed model, open it as transformers does, and return its parameters."""
    engine.sync()
    model.save_pretrained(out)
    return dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).named_parameters())


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_quantised_files_of_a_configuration_that_does_not_say_so(kind: str, tmp_path: Path) -> None:
    place = write(kind, tmp_path / "model")
    change_config(place, lambda values: values.pop("quantization_config"))
    with pytest.raises(ModelError, match=r"the files look quantised .* config.json has no quantization_c"):
        megatrain.load(place)


def test_values_of_a_configuration_that_calls_them_quantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are right as they are; that the configuration is not is said."""
    config = FAMILIES["llama"]()
    make_model(config).to(torch.bfloat16).save_pretrained(tmp_path)
    change_config(tmp_path, lambda values: values.update(quantization_config={"quant_method": "mxfp4"}))
    with caplog.at_level("WARNING"):
        megatrain.load(tmp_path)
    (said,) = [record.message for record in caplog.records if "quantised" in record.message]
    assert "config.json says that weights are quantised, and no weight of the files is" in said


@pytest.mark.parametrize("method", [["fp8"], {"a": 1}, 8, "zorg"])
def test_a_method_that_is_none_is_a_sentence(method: object, tmp_path: Path) -> None:
    place = write("fp8", tmp_path / "model")
    change_config(place, lambda values: values["quantization_config"].update(quant_method=method))
    with pytest.raises(ModelError, match=r"has a quantization_config .*, and quantised weights are") as said:
        read_config(place)
    assert str(method) in str(said.value)


def change_config(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((place / "config.json").read_text())
    change(values)
    (place / "config.json").write_text(json.dumps(values))


def test_transformers_cuts_smaller_last_blocks_evenly() -> None:
    """A matrix of 192 rows has blocks of 128 and of 64: there transformers reads other values."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales = torch.ones(192, 128).to(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0]])
    found = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert (found[:96] == 1).all()
    assert (found[96:128] == 2).all(), "transformers reads smaller last blocks as the format says by now"
    with pytest.raises(ValueError, match="not divisible by scale grid"):
        Fp8Dequantize(None)._dequantize_one(codes[:191], scales, torch.float32)


def test_what_says_how_activations_are_scaled_is_not_left_aside(tmp_path: Path) -> None:
    """Without it the model would be another one; its weights were made for scaled inputs."""
    place = write("fp8", tmp_path / "model")
    tensors = load_file(place / "model.safetensors")
    name = "model.layers.0.mlp.act_fn.scales"
    save_file(tensors | {name: torch.ones(64)}, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"{name} says how something is quantised, in a way that is not read"
    ):
        load_bound(place, read_config(place), torch.bfloat16)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_loading_peaks_at_the_state_plus_one_tensor(kind: str, tmp_path: Path) -> None:
    """From outside: codes are mapped, and a weight is made in pieces."""
    config = copy.deepcopy(QUANTISED[kind][0])
    config.hidden_size, config.intermediate_size, config.head_dim = 1024, 1024, 256
    config.num_hidden_layers = 9 if kind == "fp8" else 4
    config.num_local_experts = 8
    if kind == "mxfp4":
        config.layer_types = ["full_attention"] * 4
    tensors = load_file(write(kind, tmp_path, config) / "model.safetensors")
    largest = max(value.numel() * (4 if key.endswith("blocks") else 2) for key, value in tensors.items())
    del tensors
    run = run_script(PEAK_SCRIPT, tmp_path)
    assert run.returncode == 0, run.stderr
    peak, state = map(int, run.stdout.split())
    assert state > 90e6
    pieces_and_kernels = 18e6  # 14.4e6 was seen once, beside other work
    assert state * 0.95 < peak < state * 1.05 + largest + pieces_and_kernels
