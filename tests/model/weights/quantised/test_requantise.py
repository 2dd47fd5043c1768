"""A trained model in the format of the quantised checkpoint that it began with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import megatrain
from megatrain.errors import ConfigError, ModelError
from megatrain.model.weights.quantised.arithmetic import fp4, fp4_codes, power_for
from megatrain.model.weights.requantise import write_like
from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from tests.hf.setups import tokenizer
from tests.model.weights.quantised.test_checkpoints import QUANTISED, write
from tests.model.weights.quantised.test_values import values_of
from tests.train.project import make_config, write_corpus


def as_trained(place: Path, out: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a model in bf16 or fp32 as a run leaves it."""
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((place / "config.json").read_text())
    values.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(values))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", QUANTISED)
def test_an_untrained_model_has_every_byte_again(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Where a scale is zero too, or so small that codes make no difference."""
    place, out = write(kind, tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    tensors = load_file(place / "model.safetensors")
    name = next(key for key in tensors if "scale" in key)
    tensors[name].view(-1)[0] = 0
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt", "more": "of theirs"})
    trained = as_trained(place, tmp_path / "trained", {k: v.to(dtype) for k, v in values_of(place).items()})
    write_like(place, trained, out, kind.split()[0])
    assert (out / "model.safetensors").read_bytes() == (place / "model.safetensors").read_bytes()
    config = json.loads((place / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == config


def test_a_tied_head_that_the_checkpoint_has_too_is_written_and_links_are_followed(tmp_path: Path) -> None:
    """A hub's snapshot is of links; and of a tied model only one name is saved."""
    blobs = write("fp8", tmp_path / "models--a--b/blobs")
    config = json.loads((blobs / "config.json").read_text()) | {
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (blobs / "config.json").write_text(json.dumps(config))
    tensors = load_file(blobs / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, blobs / "model.safetensors", metadata={"format": "pt"})
    place = tmp_path / "models--a--b/snapshots/1"
    place.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (place / name).symlink_to(blobs / name)
    values = {key: value for key, value in values_of(blobs).items() if key != "lm_head.weight"}
    values["model.embed_tokens.weight"] = values["model.embed_tokens.weight"] * 2
    trained = as_trained(blobs, tmp_path / "trained", {key: value.float() for key, value in values.items()})
    (trained / "config.json").write_text(
        json.dumps({**json.loads((trained / "config.json").read_text()), "dtype": "float32"})
    )
    out = tmp_path / "out"
    out.mkdir()
    write_like(place, trained, out, "fp8")
    written = load_file(out / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(written[name], values["model.embed_tokens.weight"]), name
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    del values["model.norm.weight"]
    lacking = as_trained(blobs, tmp_path / "lacking", values)
    with pytest.raises(ModelError, match=r"lacks 1 weights of .*, such as model\.norm\.weight"):
        write_like(place, lacking, out, "fp8")


def test_codes_of_four_bits_are_the_nearest_and_of_two_the_even_one() -> None:
    values = torch.tensor(
        [0.25, 0.26, 0.75, 1.25, 1.26, 1.75, 2.5, 3.5, 5.0, 5.1, 6.9, 100.0, -0.0, -0.3, -5.0, 0.0]
    )
    expected = [0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0, -0.0, -0.5, -4.0, 0.0]
    found = fp4(fp4_codes(values[None]))[0]
    assert found.tolist() == expected
    assert math.copysign(1, found[12].item()) == -1
    grid = fp4(torch.arange(256, dtype=torch.uint8)[:, None]).float()
    assert torch.equal(fp4(fp4_codes(grid)).float(), grid)


def test_a_new_power_is_the_smallest_that_holds_the_largest_value() -> None:
    largest = torch.tensor([6.0, 6.01, 12.0, 3.0, 3.01, 448.0, 1e-30])
    powers = torch.exp2(power_for(largest, 6.0).double() - 127)
    assert powers[:5].tolist() == [1.0, 2.0, 2.0, 0.5, 1.0]
    assert bool((largest.double() <= 6 * powers).all())
    assert bool((largest.double() > 3 * powers).all())


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_trained_block_keeps_its_scale_while_its_values_fit(kind: str, tmp_path: Path) -> None:
    """Of three parts of each weight one is left alone, one shrinks a little, and one grows past its scale."""
    place, out = write(kind, tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    before, old = values_of(place), load_file(place / "model.safetensors")
    changed = {key: (value.float() * factors_for(value, kind)).bfloat16() for key, value in before.items()}
    write_like(place, as_trained(place, tmp_path / "trained", changed), out, kind.split()[0])
    new = load_file(out / "model.safetensors")
    assert {key: (value.shape, value.dtype) for key, value in new.items()} == {
        key: (value.shape, value.dtype) for key, value in old.items()
    }
    seen = set()
    for key, value in changed.items():
        if f"{key}_scales" not in old and f"{key}_scale_inv" not in old:
            assert torch.equal(new[key], value.to(old[key].dtype)), key
            continue
        blocks = mxfp4_blocks if kind == "mxfp4" else fp8_blocks
        for was, now, old_block, new_block, is_power in blocks(before[key], value, key, old, new, kind):
            (old_codes, old_scale), (codes, scale) = old_block, new_block
            most = 6.0 if is_power else 448.0
            largest = float(now.abs().max())
            if torch.equal(was, now):
                seen.add("alone")
                assert torch.equal(codes, old_codes)
                assert scale == old_scale
                continue
            if largest <= most * old_scale:
                seen.add("kept")
                assert scale == old_scale
            else:
                seen.add("new")
                assert largest / most <= scale < largest / most * (2 if is_power else 1 + 2**-22)
            expected = (now / scale).clamp(-most, most)
            as_codes = fp4_codes(expected) if is_power else expected.to(torch.float8_e4m3fn).view(torch.uint8)
            assert torch.equal(codes, as_codes)
    assert seen == {"alone", "kept", "new"}


def factors_for(value: Tensor, kind: str) -> Tensor:
    """Return factors that leave a third of the blocks alone, shrink another, and let the last one grow."""
    size = 1 if kind == "mxfp4" else QUANTISED[kind][2]["weight_block_size"][0]
    places = [torch.arange(length) // size for length in value.shape[-2:]]
    numbers = (
        places[-1] if kind == "mxfp4" else places[0][:, None] + places[-1] if value.ndim > 1 else places[0]
    )
    return torch.tensor([1.0, 0.875, 1000.0])[numbers % 3]


def fp8_blocks(before: Tensor, value: Tensor, key: str, old: Any, new: Any, kind: str) -> Iterator[Any]:
    size = QUANTISED[kind][2]["weight_block_size"][0]
    for top in range(0, value.shape[0], size):
        for left in range(0, value.shape[1], size):
            part = slice(top, top + size), slice(left, left + size)
            place = top // size, left // size
            told = [
                (each[key].view(torch.uint8)[part], float(each[f"{key}_scale_inv"][place]))
                for each in (old, new)
            ]
            yield before[part].float(), value[part].float(), *told, False


def mxfp4_blocks(before: Tensor, value: Tensor, key: str, old: Any, new: Any, _: str) -> Iterator[Any]:
    for expert, row, group in torch.cartesian_prod(
        *(torch.arange(size) for size in old[f"{key}_scales"].shape)
    ).tolist():
        part = expert, slice(32 * group, 32 * group + 32), row
        place = expert, row, group
        told = [
            (each[f"{key}_blocks"][place], 2.0 ** (int(each[f"{key}_scales"][place]) - 127))
            for each in (old, new)
        ]
        yield before[part].float(), value[part].float(), *told, True


def test_other_models_and_formats_are_refused(tmp_path: Path) -> None:
    place, out = write("fp8", tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    values = values_of(place)
    with pytest.raises(ConfigError, match=r"--format mxfp4 writes a model as the checkpoint .* is in fp8$"):
        write_like(place, as_trained(place, tmp_path / "a", values), out, "mxfp4")
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(
        ModelError, match=r"has shape \[64, 32\], and \[64, 64\] in .*cannot change in this format"
    ):
        write_like(
            place,
            as_trained(place, tmp_path / "b", values | {name: values[name][:, :32].clone()}),
            out,
            "fp8",
        )
    with pytest.raises(ModelError, match=r"has lm_head\.bias, and .* has no such tensor"):
        write_like(
            place, as_trained(place, tmp_path / "c", values | {"lm_head.bias": torch.ones(2)}), out, "fp8"
        )
    lacking = {key: value for key, value in values.items() if key != name}
    with pytest.raises(ModelError, match=rf"lacks 1 weights of .*, such as {name}"):
        write_like(place, as_trained(place, tmp_path / "d", lacking), out, "fp8")
    assert list(out.iterdir()) == []


@pytest.mark.filterwarnings("ignore")  # of transformers, on what this CPU could do better
@pytest.mark.parametrize("kind", ["mxfp4", "fp8 experts"])
def test_a_run_is_exported_as_its_checkpoint_is(kind: str, tmp_path: Path) -> None:
    """As a model, and as adapters that are merged; it is what was trained, up to its codes."""
    place = write(kind, tmp_path / "model")
    tokenizer().save_pretrained(place)
    write_corpus(tmp_path / "corpus.txt")
    method = kind.split()[0]
    model = {"path": str(place), "init": "pretrained"}
    settings: dict[str, Any] = {
        "model": model,
        "train": {"steps": 2},
        "optim": {"warmup_steps": 0},
        "data": {"seq_len": 16},
        "eval": {},
    }
    run = train(make_config(tmp_path, "run", **settings))
    export_run(run, tmp_path / "out", quantised=method)
    assert not (tmp_path / "out/.whole").exists()
    again = megatrain.load(tmp_path / "out", precision="bf16")
    trained = dict(AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).named_parameters())
    assert {name for name, _ in again.named_parameters()} == trained.keys()
    engine = megatrain.attach(again, device="cpu")
    apart = [
        float((value - trained[name]).abs().max() / trained[name].abs().max())
        for name, value in engine.named_masters()
    ]
    assert 0 < max(apart) < 0.2
    with pytest.raises(ConfigError, match="use mxfp4 or fp8, or leave it out"):
        export_run(run, tmp_path / "other", quantised="int3")
    with pytest.raises(ConfigError, match="leave --max-shard-size out"):
        export_run(run, tmp_path / "other", quantised=method, max_shard_bytes=1000)
    adapters = train(make_config(tmp_path, "lora", **settings, lora={"r": 2}))
    with pytest.raises(ConfigError, match="adapters are not quantised; add --merge"):
        export_run(adapters, tmp_path / "other", quantised=method)
    export_run(adapters, tmp_path / "merged", merges=True, quantised=method)
    assert not (tmp_path / "merged/.whole").exists()
    assert (
        load_file(tmp_path / "merged/model.safetensors").keys()
        == load_file(place / "model.safetensors").keys()
    )
    shutil.rmtree(place)
    with pytest.raises(ModelError, match="model"):
        export_run(run, tmp_path / "gone", quantised=method)
    assert not (tmp_path / "gone").exists()
