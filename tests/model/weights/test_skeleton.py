from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, T5Config

from megatrain.errors import ModelError
from megatrain.hardware import resident_bytes
from megatrain.model.weights.files import model_directory
from megatrain.model.weights.skeleton import build_skeleton, read_config, tied_names
from tests.families import FAMILIES


def _write_config(directory: Path, **values: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_config_equals_transformers(tmp_path: Path) -> None:
    config = FAMILIES["qwen3_moe"]()
    config.save_pretrained(tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path).to_dict() == expected.to_dict()
    assert read_config(str(tmp_path)).to_dict() == read_config(tmp_path).to_dict()


def test_a_large_model_is_built_without_its_weights() -> None:
    config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256)
    before = resident_bytes()
    model = build_skeleton(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) > 60e9
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert resident_bytes() - before < 200 << 20


def test_ties_training_mode_and_random_state_are_those_of_from_pretrained() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = build_skeleton(FAMILIES["llama_tied"](), dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tied_names(model)["model.embed_tokens.weight"] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert not model.training
    assert model.generation_config.eos_token_id == 2


def test_the_given_config_is_not_changed() -> None:
    config = FAMILIES["gemma3_text"]()
    before = config.to_dict()
    build_skeleton(config, dtype=torch.bfloat16)
    assert config.to_dict() == before


def test_attention_implementation_is_passed_on() -> None:
    model = build_skeleton(FAMILIES["llama"](), dtype=torch.float32, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    default = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    skeleton = build_skeleton(FAMILIES["llama"](), dtype=torch.float32)
    assert skeleton.config._attn_implementation == default.config._attn_implementation
    with pytest.raises(ModelError, match="cannot be built"):
        build_skeleton(FAMILIES["llama"](), dtype=torch.float32, attn_implementation="nonsense")


def test_remote_code_is_refused_and_never_runs(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    code = f"open({str(canary)!r}, 'w')\nfrom transformers import LlamaConfig as Remote\n"
    (tmp_path / "remote_code.py").write_text(code)
    with pytest.raises(ModelError, match="remote code"):
        read_config(
            _write_config(tmp_path, model_type="remote", auto_map={"AutoConfig": "remote_code.Remote"})
        )
    for auto_map in ({"AutoModelForCausalLM": "remote_code.Remote"}, {"AutoConfig": "remote_code.Remote"}):
        config = read_config(_write_config(tmp_path, model_type="llama", auto_map=auto_map))
        assert type(config) is LlamaConfig, "as DeepSeek's are: transformers has the class"
        assert not hasattr(config, "auto_map")
        build_skeleton(config, dtype=torch.float32)
    assert not canary.exists()
    assert "remote_code" not in sys.modules


def test_a_config_object_with_remote_code_is_refused() -> None:
    config = LlamaConfig(auto_map={"AutoModelForCausalLM": "remote_code.Remote"})
    with pytest.raises(ModelError, match="remote code"):
        build_skeleton(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": ["llama"]}', "no model_type"),
        ('{"model_type": "no_such_model"}', "unknown"),
        ('{"model_type": "t5"}', "not a causal language model"),
        ('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}', "BertForMaskedLM"),
        ('{"model_type": "llama", "architectures": 0.5}', "architectures 0.5; it must be a list of names"),
        ('{"model_type": "llama", "architectures": true}', "it must be a list of names"),
        ('{"model_type": "llama", "architectures": [["Llama"]]}', "it must be a list of names"),
        ("[" * 100_000, "JSON"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}', "quantization_config"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "not valid"),
        ('{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}', "not valid"),
    ],
)
def test_bad_configs_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_directory_and_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    for path in (tmp_path / "absent", str(tmp_path / "absent"), "./absent", "a/b/c"):
        with pytest.raises(ModelError, match="not a directory"):
            read_config(path)
        with pytest.raises(ModelError, match="not a directory"):
            model_directory(path)
    assert model_directory(str(tmp_path)) == tmp_path


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match="cannot be read from the Hugging Face hub, which is not asked"
    ) as caught:
        read_config("no-such-organisation/no-such-model")
    assert "\n" not in str(caught.value)
    with pytest.raises(
        ModelError, match="cannot be read from the Hugging Face hub, which is not asked"
    ) as caught:
        model_directory("no-such-organisation/no-such-model")
    assert "\n" not in str(caught.value)


def test_classes_without_causal_language_models_are_refused() -> None:
    with pytest.raises(ModelError, match="T5Config"):
        build_skeleton(T5Config(), dtype=torch.float32)
    with pytest.raises(ModelError, match="quantised"):
        build_skeleton(LlamaConfig(quantization_config={"quant_method": "fp8"}), dtype=torch.float32)
