from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain.errors import ModelError
from megatrain.model.weights.files import checkpoint_files, load_weights, read_headers, read_processor
from megatrain.model.weights.generation import read_generation_config
from megatrain.model.weights.reading import open_weights, read_weights
from megatrain.model.weights.skeleton import build_skeleton, persistent_buffers, read_config
from tests.families import FAMILIES
from tests.forks import run_script
from tests.model.resident import CopySink, assert_same_state, bind_parameters, load_bound, random_model

FUSED_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next", "jamba")


def _save(family: str, directory: Path, *, max_shard_size: str = "5GB") -> Path:
    random_model(FAMILIES[family]()).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@pytest.fixture(scope="module")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llama(saved_llama: Path, tmp_path: Path) -> Path:
    """A model directory of the test's own, in one file."""
    for file in saved_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def sharded_llama(tmp_path: Path) -> Path:
    return _save("llama", tmp_path, max_shard_size="60KB")


class _UntouchedSink:
    """Fails the test when a value arrives."""

    def put(self, name: str, value: torch.Tensor, region: Any = ()) -> None:
        raise AssertionError(f"{name} was written before all checks were made")


def _refuse(directory: Path, message: str) -> str:
    """Load into a sink that must get nothing, and return the one line of the refusal."""
    model = build_skeleton(read_config(directory), dtype=torch.float32)
    with pytest.raises(ModelError, match=message) as caught:
        load_weights(model, directory, _UntouchedSink())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _edit(directory: Path, changed: Mapping[str, torch.Tensor], dropped: Collection[str] = ()) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors = {key: value for key, value in tensors.items() if key not in dropped}
    tensors.update(changed)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _edit_index(directory: Path, changed: Mapping[str, str]) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"].update(changed)
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loading_equals_from_pretrained(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights, buffers, dtypes, ties, configuration and generation settings are those of from_pretrained."""
    _save(family, tmp_path, max_shard_size="60KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    actual, _ = load_bound(tmp_path, read_config(tmp_path), dtype)
    assert_same_state(actual, expected)
    assert actual.config.to_dict() == expected.config.to_dict()
    assert actual.generation_config.to_dict() == expected.generation_config.to_dict()
    assert actual.training == expected.training


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_fused_experts_arrive_one_matrix_at_a_time(family: str, tmp_path: Path) -> None:
    _, sink = load_bound(_save(family, tmp_path), FAMILIES[family](), torch.float32)
    fused = [
        region for name, region in sink.regions if name.endswith(("gate_up_proj", "down_proj")) and region
    ]
    num_matrices = sum(".experts." in key for key in load_file(tmp_path / "model.safetensors"))
    assert len(fused) == num_matrices > 0
    assert len(set(map(str, sink.regions))) == len(sink.regions)


def test_a_single_file_loads_like_shards(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shards = _save("llama", tmp_path_factory.mktemp("shards"), max_shard_size="60KB")
    assert len(checkpoint_files(shards)) > 2
    assert checkpoint_files(llama) == [llama / "model.safetensors"]
    one, _ = load_bound(llama, FAMILIES["llama"](), torch.float32)
    many, _ = load_bound(shards, FAMILIES["llama"](), torch.float32)
    assert_same_state(one, many)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_reach_the_sink_in_the_dtype_of_the_file(llama: Path, dtype: torch.dtype) -> None:
    """The sink converts: a float32 master gets every bit that the file has."""
    tensors = load_file(llama / "model.safetensors")
    _edit(llama, {key: value.to(dtype) for key, value in tensors.items()})
    model, sink = load_bound(llama, FAMILIES["llama"](), torch.float32)
    assert sink.dtypes == {dtype}
    assert_same_state(model, AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))


def test_other_spellings_of_keys_load(llama: Path) -> None:
    """A checkpoint of the base model alone has no prefix; its keys are completed as transformers does."""
    tensors = load_file(llama / "model.safetensors")
    _edit(llama, {key.removeprefix("model."): value for key, value in tensors.items()}, list(tensors))
    model, _ = load_bound(llama, FAMILIES["llama"](), torch.float32)
    assert_same_state(model, AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))


def test_special_values_keep_their_bits(llama: Path) -> None:
    key = "model.norm.weight"
    smallest, negative_zero, largest = 1, -(2**31), 0x7F7F_FFFF
    bits = torch.tensor([smallest, negative_zero, largest, -1 - 0x80_0000, 0x80_0000, 0x7F_FFFF, 0, 5] * 4)
    bits = bits.to(torch.int32)
    _edit(llama, {key: bits.view(torch.float32)})
    assert bits.view(torch.float32).isfinite().all()
    assert not bits.view(torch.float32)[[2, 2]].sum().isfinite()
    model, _ = load_bound(llama, FAMILIES["llama"](), torch.float32)
    assert torch.equal(model.model.norm.weight.detach().view(torch.int32), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [[float("nan")], [float("inf")], [float("inf"), float("-inf")]])
def test_values_that_are_not_finite_are_named_and_counted(
    llama: Path, dtype: torch.dtype, values: list[float]
) -> None:
    tensors = {key: value.to(dtype) for key, value in load_file(llama / "model.safetensors").items()}
    key = "model.layers.2.mlp.down_proj.weight"
    tensors[key].view(-1)[7 : 7 + len(values)] = torch.tensor(values).to(dtype)
    _edit(llama, tensors)
    model = bind_parameters(build_skeleton(read_config(llama), dtype=torch.float32))
    with pytest.raises(ModelError) as caught:
        load_weights(model, llama, CopySink(model))
    assert f"{key} has {len(values)} of 1,536 values that are not finite" in str(caught.value)
    assert str(llama / "model.safetensors") in str(caught.value)


def test_large_finite_values_are_not_refused(llama: Path) -> None:
    """Their sum overflows."""
    _edit(llama, {"model.norm.weight": torch.full((32,), 60_000.0, dtype=torch.float16)})
    model, _ = load_bound(llama, FAMILIES["llama"](), torch.float32)
    assert model.model.norm.weight.eq(60_000).all()


def test_keys_without_a_place_are_returned(llama: Path) -> None:
    extra = {"vision.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _edit(llama, extra)
    model = bind_parameters(build_skeleton(read_config(llama), dtype=torch.float32))
    assert load_weights(model, llama, CopySink(model)) == ["vision.weight"]


def test_tied_weights_saved_under_either_or_both_names_load(tmp_path: Path) -> None:
    _save("llama_tied", tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    _edit(tmp_path, {"lm_head.weight": embedding.clone()})
    both, sink = load_bound(tmp_path, FAMILIES["llama_tied"](), torch.float32)
    assert_same_state(both, expected)
    names = [name for name, _ in sink.regions]
    assert sorted(names) == sorted(dict(both.named_parameters()))
    _edit(tmp_path, {}, ["model.embed_tokens.weight"])
    head_only, _ = load_bound(tmp_path, FAMILIES["llama_tied"](), torch.float32)
    assert_same_state(head_only, expected)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    _save("llama_tied", tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    embedding.view(torch.int32)[0, 0] += 1
    _edit(tmp_path, {"lm_head.weight": embedding})
    assert "lm_head.weight" in _refuse(tmp_path, "tied in the model and differ")


def test_persistent_buffers_are_loaded_in_place(tmp_path: Path) -> None:
    _save("deepseek_v3", tmp_path)
    model = bind_parameters(build_skeleton(read_config(tmp_path), dtype=torch.bfloat16))
    buffers = persistent_buffers(model)
    addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    load_weights(model, tmp_path, CopySink(model))
    assert len(buffers) == 3
    for name, buffer in persistent_buffers(model).items():
        assert buffer.data_ptr() == addresses[name]
        assert buffer.dtype == torch.float32
        assert buffer.abs().sum() > 0


def test_missing_tensors_are_named(llama: Path) -> None:
    _edit(llama, {}, [f"model.layers.{index}.mlp.up_proj.weight" for index in (1, 2)])
    assert "model.layers.1.mlp.up_proj.weight, model.layers.2" in _refuse(llama, "lacks 2 of")


def test_a_missing_buffer_is_refused(tmp_path: Path) -> None:
    _save("deepseek_v3", tmp_path)
    _edit(tmp_path, {}, ["model.layers.1.mlp.gate.e_score_correction_bias"])
    _refuse(tmp_path, "lacks 1 of the model's tensors: .*e_score_correction_bias")


def test_a_wrong_shape_names_key_file_and_both_shapes(llama: Path) -> None:
    _edit(llama, {"model.norm.weight": torch.ones(31)})
    message = _refuse(llama, "shape")
    for part in ("model.norm.weight", "model.safetensors", "[31]", "[32]"):
        assert part in message


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_wrong_experts_are_refused(family: str, tmp_path: Path) -> None:
    _save(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = next(key for key in tensors if ".experts.2." in key)
    save_file({**tensors, key: tensors[key][:, :-1].contiguous()}, tmp_path / "model.safetensors")
    assert key.rpartition(".experts.")[0] in _refuse(tmp_path, "shape|places")
    save_file({name: value for name, value in tensors.items() if name != key}, tmp_path / "model.safetensors")
    _refuse(tmp_path, "the checkpoint has")


def test_two_sources_of_one_tensor_are_refused(llama: Path) -> None:
    _edit(llama, {"norm.weight": torch.ones(32)})
    message = _refuse(llama, "two sources")
    assert "model.norm.weight" in message


def test_a_key_in_two_files_is_refused(sharded_llama: Path) -> None:
    first, second = checkpoint_files(sharded_llama)[:2]
    tensors = load_file(first)
    key = next(iter(tensors))
    save_file({**load_file(second), key: tensors[key]}, second)
    message = _refuse(sharded_llama, "keep one")
    assert key in message
    assert first.name in message
    assert second.name in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(llama: Path, dtype: torch.dtype) -> None:
    _edit(llama, {"model.norm.weight": torch.ones(32).to(dtype)})
    assert "model.norm.weight" in _refuse(llama, "dtype")


@pytest.mark.parametrize("num_bytes", [0, 7, 100, 4000, 100_000])
def test_a_truncated_file_is_named(llama: Path, num_bytes: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert str(file) in _refuse(llama, "truncated")


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}}',
        b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}',
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
    ],
)
def test_a_damaged_header_is_named(llama: Path, header: bytes) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert str(file) in _refuse(llama, "truncated or no safetensors")
    file.write_bytes(struct.pack("<Q", 2**63) + header)
    assert str(file) in _refuse(llama, "truncated or no safetensors")


def test_an_empty_tensor_of_a_huge_shape_is_named(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with open_weights(file) as handle, pytest.raises(ModelError, match="a cannot be read") as caught:
        read_weights({file: handle}, read_headers([file])["a"])
    assert "\n" not in str(caught.value)


def test_missing_shards_are_all_named(sharded_llama: Path) -> None:
    first, second, *_ = checkpoint_files(sharded_llama)
    first.unlink()
    second.unlink()
    message = _refuse(sharded_llama, "missing")
    assert first.name in message
    assert second.name in message


def test_an_index_that_disagrees_with_its_files_is_refused(sharded_llama: Path) -> None:
    _edit_index(sharded_llama, {"extra.weight": checkpoint_files(sharded_llama)[0].name})
    assert "extra.weight" in _refuse(sharded_llama, "it is not")


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "x.bin", "", "\ud800.safetensors"],
)
def test_an_index_that_leaves_the_directory_is_refused(sharded_llama: Path, name: str) -> None:
    _edit_index(sharded_llama, {"model.norm.weight": name})
    _refuse(sharded_llama, "it must be a .safetensors file of the directory")


def test_an_index_that_is_far_too_large_is_not_read(sharded_llama: Path) -> None:
    with open(sharded_llama / "model.safetensors.index.json", "r+b") as file:
        file.truncate(2**28 + 1)  # without taking room
    _refuse(sharded_llama, "is larger than 256 MiB")


def test_an_index_with_a_name_that_no_disk_has_is_refused(sharded_llama: Path) -> None:
    _edit_index(sharded_llama, {"model.norm.weight": "a" * 300 + ".safetensors"})
    _refuse(sharded_llama, "File name too long")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(sharded_llama: Path, text: str) -> None:
    (sharded_llama / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in _refuse(sharded_llama, "JSON|weight_map|file")


def test_a_link_out_of_the_directory_is_refused(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "model.safetensors"
    (llama / "model.safetensors").rename(outside)
    (llama / "model.safetensors").symlink_to(outside)
    _refuse(llama, "link")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_config),
        ("generation_config.json", read_generation_config),
        ("preprocessor_config.json", read_processor),  # a checkpoint has its bytes, and is shared
    ],
)
def test_a_link_to_somebody_s_secret_is_not_read(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, name: str, read: Callable[[Path], object]
) -> None:
    secret = tmp_path_factory.mktemp("home") / "id"
    secret.write_text('{"a": "secret"}')
    (llama / name).unlink(missing_ok=True)
    (llama / name).symlink_to(secret)
    with pytest.raises(ModelError, match=f"{name} is a link to a file outside the model directory") as caught:
        read(llama)
    assert '"secret"' not in str(caught.value)
    (llama / name).unlink()
    (llama / "other").write_text("{}")
    (llama / name).symlink_to("other")
    with contextlib.suppress(ModelError):  # an empty configuration is none
        read(llama)


def test_the_links_of_the_hub_cache_are_followed(saved_llama: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(saved_llama.iterdir()):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    model, _ = load_bound(snapshot, FAMILIES["llama"](), torch.float32)
    assert_same_state(model, AutoModelForCausalLM.from_pretrained(saved_llama))


class _Canary:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickles_are_never_opened(llama: Path, name: str) -> None:
    canary = llama / "fired"
    (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(pickle.dumps(_Canary(canary)))
    message = _refuse(llama, "pickle" if name != "model.safetensors" else "no safetensors")
    assert name in message
    assert not canary.exists()


def test_a_directory_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    _refuse(llama, "has neither")
    with pytest.raises(ModelError, match="not a directory"):
        checkpoint_files(llama / "absent")


def test_bad_generation_settings_are_refused(llama: Path) -> None:
    (llama / "generation_config.json").write_text("{")
    assert "generation_config.json" in _refuse(llama, "not valid")


PEAK_SCRIPT = """
import sys, threading, time
import torch
from megatrain.hardware import resident_bytes
from megatrain.model.weights.files import load_weights
from megatrain.model.weights.skeleton import build_skeleton, read_config
from tests.model.resident import CopySink, bind_parameters

class Sink(CopySink):
    def put(self, name, value, region=()):
        peaks.append(resident_bytes())
        super().put(name, value, region)
        peaks.append(resident_bytes())

def watch():
    while not done:
        peaks.append(resident_bytes())
        time.sleep(0.001)

directory = sys.argv[1]
model = build_skeleton(read_config(directory), dtype=torch.bfloat16)
torch.zeros(1 << 20).add_(1).bfloat16()  # what torch itself takes once
before, peaks, done = resident_bytes(), [], False
thread = threading.Thread(target=watch)
thread.start()
bind_parameters(model)
load_weights(model, directory, Sink(model))
done = True
thread.join()
state = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
print(max(peaks) - before, state)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.parity)])
def test_loading_peaks_at_the_state_plus_one_tensor(family: str, tmp_path: Path) -> None:
    """Fused, the up projections of mixtral's experts are most of the state: a copy would show."""
    config = FAMILIES[family]()
    config.hidden_size, config.intermediate_size, config.head_dim = 1024, 1024, 256
    config.num_hidden_layers = 1 if family == "mixtral" else 9
    config.num_local_experts = 16
    model = build_skeleton(config, dtype=torch.bfloat16)
    for name, parameter in list(model.named_parameters()):
        prefix, _, leaf = name.rpartition(".")
        values = torch.full(parameter.shape, 0.5, dtype=torch.bfloat16)
        model.get_submodule(prefix)._parameters[leaf] = torch.nn.Parameter(values)
    model.save_pretrained(tmp_path, max_shard_size="32MB")
    assert len(checkpoint_files(tmp_path)) > 2
    del model
    run = run_script(PEAK_SCRIPT, tmp_path)
    assert run.returncode == 0, run.stderr
    peak, state = map(int, run.stdout.split())
    assert state > 95e6
    assert state * 0.95 < peak < state * 1.05 + 1024 * 1024 * 2
