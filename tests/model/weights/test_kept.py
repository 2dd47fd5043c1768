"""Which weights of a quantised checkpoint are kept as stored, and that their codes make its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.errors import ConfigError
from megatrain.model.weights.encoding import Region, scratch_of
from megatrain.model.weights.files import PlannedWeights
from megatrain.model.weights.kept import encoding_of, host_bytes_of, keep_as_stored
from megatrain.model.weights.kept_by_config import keep_as_planned
from megatrain.model.weights.quantised.fp8 import Fp8Encoding
from megatrain.model.weights.skeleton import build_skeleton, read_config
from tests.model.resident import load_bound
from tests.model.weights.quantised.test_checkpoints import QUANTISED, write


def planned(place: Path) -> tuple[PreTrainedModel, PlannedWeights]:
    model = build_skeleton(read_config(place), dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, PlannedWeights(model, place)


class Taken:
    """Takes the codes of kept weights, and the values of others."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.encodings = {name: encoding_of(p) for name, p in model.named_parameters()}
        self.parts: dict[str, dict[str, Tensor]] = {}
        self.values: list[str] = []

    def put(self, name: str, value: Tensor, region: Region = ()) -> None:
        self.values.append(name)

    def keeps(self, name: str) -> bool:
        return self.encodings[name] is not None

    def put_codes(self, name: str, encoding: Any, part: str, tensor: Tensor, region: Region) -> None:
        whole = self.encodings[name]
        assert whole is not None
        if name not in self.parts:
            self.parts[name] = whole.views(torch.zeros(whole.nbytes, dtype=torch.uint8))
        encoding.put(part, self.parts[name][part], region, tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", QUANTISED)
def test_kept_codes_make_the_values_that_are_read(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    place = write(kind, tmp_path)
    expected = dict(load_bound(place, read_config(place), torch.bfloat16)[0].named_parameters())
    model, weights = planned(place)
    keep_as_stored(model, weights.conversions, place)
    taken = Taken(model)
    weights.read(taken, taken)
    assert taken.parts
    assert not taken.parts.keys() & set(taken.values)
    for name, parts in taken.parts.items():
        encoding = taken.encodings[name]
        assert encoding is not None
        out = torch.empty(expected[name].shape, dtype=dtype)
        encoding.decode(parts, out, scratch_of(out))
        assert torch.equal(out, expected[name].to(dtype)), name
        assert encoding.nbytes < 0.8 * expected[name].nbytes + 2 * 256


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "fp8 experts"])
def test_a_configuration_says_what_the_files_do(kind: str, tmp_path: Path) -> None:
    place = write(kind, tmp_path)
    by_files, weights = planned(place)
    keep_as_stored(by_files, weights.conversions, place)
    found = []
    for where in (place / "config.json", place):
        by_config, _ = planned(place)
        keep_as_planned(by_config, str(where))
        found.append({name: encoding_of(p) for name, p in by_config.named_parameters()})
    assert found[0] == found[1] == {name: encoding_of(p) for name, p in by_files.named_parameters()}
    assert any(found[0].values())


@pytest.mark.parametrize(
    ("pattern", "left"),
    [("lm_head", 14), ("model.layers.1", 7), ("model.layers.*.self_attn", 6), ("up_proj", 12)],
)
def test_modules_that_a_configuration_leaves_out_are_not_kept(
    pattern: str, left: int, tmp_path: Path
) -> None:
    place = write("fp8", tmp_path)
    values = json.loads((place / "config.json").read_text())
    values["quantization_config"]["modules_to_not_convert"] = [pattern]
    (place / "config.json").write_text(json.dumps(values))
    model, _ = planned(place)
    keep_as_planned(model, str(place / "config.json"))
    assert sum(encoding_of(parameter) is not None for parameter in model.parameters()) == left


def test_experts_whose_blocks_do_not_meet_are_read_as_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A scale would be of two matrices; the rest of the checkpoint is kept all the same, and it is said."""
    place = write("fp8 ragged", tmp_path)
    model, weights = planned(place)
    keep_as_stored(model, weights.conversions, place)
    experts = {n: encoding_of(p) is not None for n, p in model.named_parameters() if ".experts." in n}
    assert experts == {
        "model.layers.1.mlp.experts.gate_up_proj": False,
        "model.layers.1.mlp.experts.down_proj": True,
    }
    assert "17 of 18 quantised weights are kept as stored" in caplog.text
    assert "gate_up_proj and others" in caplog.text


def test_joined_matrices_have_to_meet_at_edges_of_blocks() -> None:
    encoding = Fp8Encoding((32, 24), (16, 8), torch.float8_e4m3fn)
    halves: list[Region] = [(0, slice(0, 32)), (0, slice(32, 64))]
    assert encoding.of_all((1, 64, 24), halves) == Fp8Encoding((1, 64, 24), (16, 8), torch.float8_e4m3fn)
    assert encoding.of_all((1, 64, 24), [(0, slice(0, 24)), (0, slice(24, 64))]) is None
    assert encoding.of_all((32, 52), [(slice(None), slice(0, 24)), (slice(None), slice(24, 52))]) is not None
    assert encoding.of_all((32, 44), [(slice(None), slice(0, 20)), (slice(None), slice(20, 44))]) is None


@pytest.mark.parametrize(("scales", "block"), [((), (32, 24)), ((32, 1), (1, 24)), ((2, 3), (16, 8))])
def test_scales_of_any_grid_lie_where_their_expert_is(
    scales: tuple[int, ...], block: tuple[int, int]
) -> None:
    """Of a whole matrix, of its rows and of its blocks; two experts, whose two matrices are joined."""
    one = Fp8Encoding((32, 24), block, torch.float8_e4m3fn)
    regions: list[Region] = [(n, slice(start, start + 32)) for start in (0, 32) for n in (0, 1)]
    whole = one.of_all((2, 64, 24), regions)
    assert whole is not None
    parts = whole.views(torch.zeros(whole.nbytes, dtype=torch.uint8))
    expected = torch.empty(2, 64, 24)
    for region in regions:
        codes, factors = torch.randn(32, 24).to(torch.float8_e4m3fn), torch.rand(scales).bfloat16()
        one.put("codes", parts["codes"], region, codes)
        one.put("scales", parts["scales"], region, factors)
        grid = factors.reshape(32 // block[0], 24 // block[1])
        times = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        expected[region] = (codes.float() * times.float()).bfloat16().float()
    found = torch.empty(2, 64, 24)
    whole.decode(parts, found, scratch_of(found))
    assert torch.equal(found, expected)


def test_a_trained_parameter_has_values(tmp_path: Path) -> None:
    place = write("fp8", tmp_path)
    model, weights = planned(place)
    keep_as_stored(model, weights.conversions, place)
    parameter = next(p for p in model.parameters() if encoding_of(p) is not None)
    assert host_bytes_of(parameter) < parameter.nbytes
    parameter.requires_grad_(True)
    assert encoding_of(parameter) is None
    assert host_bytes_of(parameter) == parameter.nbytes


def test_formats_that_are_not_kept_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    model, weights = planned(write("fp8", tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"config\.json is in gptq and has nothing to be kept"):
        keep_as_planned(model, str(file))
    for conversion in weights.conversions:  # as those of gptq, which are made of parts and have no encoding
        for _, source in conversion.sources:
            if source.making is not None:
                object.__setattr__(source.making, "encoding", None)
    with pytest.raises(ConfigError, match="is in a format that is read in bf16 alone"):
        keep_as_stored(model, weights.conversions, "model")
