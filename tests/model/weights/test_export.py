from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.errors import OutputError
from megatrain.model.weights.export import export_weights
from megatrain.model.weights.skeleton import read_config
from tests.families import FAMILIES
from tests.model.resident import assert_same_state, load_bound, random_model
from tests.products import every_value


def _groups(model: PreTrainedModel) -> list[list[str]]:
    """Group parameters by block, as the engine does: each element of the layer list, and the rest."""
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        number = next((part for part in name.split(".") if part.isdigit()), "outer")
        groups.setdefault(number, []).append(name)
    return list(groups.values())


def export(model: PreTrainedModel, out: Path, max_shard_bytes: int = 5 * 2**30) -> list[str]:
    """Export, and return the names in the order in which they were read."""
    parameters = dict(model.named_parameters())
    names: list[str] = []

    def read(name: str) -> torch.Tensor:
        names.append(name)
        return parameters[name]

    export_weights(model, out, groups=_groups(model), read=read, max_shard_bytes=max_shard_bytes)
    return names


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    tensors = [load_file(file) for file in files]
    merged = {key: value for part in tensors for key, value in part.items()}
    assert len(merged) == sum(map(len, tensors))
    return merged


@pytest.mark.sampled(4)
@every_value(family=list(FAMILIES), dtype=[torch.float32, torch.bfloat16])
def test_export_equals_save_pretrained(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Keys, values, dtypes and configuration are those of save_pretrained; the model opens again."""
    random_model(FAMILIES[family]()).save_pretrained(tmp_path / "source")
    resident = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=dtype)
    resident.save_pretrained(tmp_path / "expected")
    model, _ = load_bound(tmp_path / "source", read_config(tmp_path / "source"), dtype)
    names = export(model, tmp_path / "actual", max_shard_bytes=40_000)
    assert sorted(names) == sorted(dict(model.named_parameters()))
    expected, actual = tensors_of(tmp_path / "expected"), tensors_of(tmp_path / "actual")
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert torch.equal(actual[key], value), key
    for name in ("config.json", "generation_config.json"):
        expected_text, actual_text = ((tmp_path / side / name).read_text() for side in ("expected", "actual"))
        assert json.loads(actual_text) == json.loads(expected_text)
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "actual", dtype="auto"), resident)


@pytest.mark.parametrize("family", ["llama_tied", "mixtral", "deepseek_v3", "jamba", "gpt2"])
def test_a_model_that_was_never_loaded_exports_like_save_pretrained(family: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[family]())
    model.save_pretrained(tmp_path / "expected")
    export(model, tmp_path / "actual")
    expected, actual = tensors_of(tmp_path / "expected"), tensors_of(tmp_path / "actual")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], value) for key, value in expected.items())


def test_a_small_model_is_one_file_and_a_large_one_is_sharded_by_size(tmp_path: Path) -> None:
    model = random_model(FAMILIES["llama"]())
    export(model, tmp_path / "one")
    assert sorted(file.name for file in (tmp_path / "one").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    export(model, tmp_path / "many", max_shard_bytes=40_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert len(shards) > 2
    assert all(sum(value.nbytes for value in load_file(shard).values()) <= 40_000 for shard in shards)
    for shard in shards:
        with safe_open(shard, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            assert {index["weight_map"][key] for key in handle.keys()} == {shard.name}  # noqa: SIM118
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.parameters())
    assert not list((tmp_path / "many").glob("*.partial"))


def test_masters_can_be_exported_in_another_dtype(tmp_path: Path) -> None:
    model = random_model(FAMILIES["llama"]())
    half = AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=torch.bfloat16)
    parameters = dict(model.named_parameters())
    export_weights(
        half,
        tmp_path / "out",
        groups=_groups(half),
        read=parameters.__getitem__,
        dtype=lambda _: torch.float32,
    )
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert reloaded.config.dtype == torch.float32
    assert_same_state(reloaded, model)


def test_no_more_than_one_unit_is_held(tmp_path: Path) -> None:
    """Each value is dropped before the next is read, though all of them go to one file."""
    model = random_model(FAMILIES["mixtral"]())
    parameters = dict(model.named_parameters())
    values: list[weakref.ref[torch.Tensor]] = []

    def read(name: str) -> torch.Tensor:
        assert all(reference() is None for reference in values)
        value = parameters[name].detach().clone()
        values.append(weakref.ref(value))
        return value

    export_weights(model, tmp_path / "out", groups=_groups(model), read=read)
    assert len(values) == len(parameters)


def test_a_directory_that_holds_a_model_is_refused_and_kept(tmp_path: Path) -> None:
    model = random_model(FAMILIES["llama"]())
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        out = tmp_path / name.partition(".")[0]
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(OutputError, match="already holds a model"):
            export(model, out)
        assert [file.read_text() for file in out.iterdir()] == ["mine"]


def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match="file"):
            export(random_model(FAMILIES["llama"]()), out)


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    model = random_model(FAMILIES["llama"]())
    parameters = dict(model.named_parameters())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")

    def read(name: str) -> torch.Tensor:
        if name == "model.norm.weight":
            raise OSError("no space left on device")
        return parameters[name]

    for out in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(OutputError, match="no space left"):
            export_weights(model, out, groups=_groups(model), read=read, max_shard_bytes=40_000)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "new").exists()
