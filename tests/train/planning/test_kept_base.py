"""Plans of a base that is kept as stored: from its files, and from its configuration alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config, build_config
from megatrain.config.adaptation import AS_STORED, DEQUANTISED
from megatrain.config.choice import Choice
from megatrain.config.sizes import binary
from megatrain.errors import ConfigError
from megatrain.hardware import load_machine
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.anatomy_cache import anatomy_json, read_anatomy
from megatrain.plan.cost import pricing
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.search.planner import make_plan
from megatrain.train.caller import NOBODY
from megatrain.train.planning.asking import ask, make_request
from megatrain.train.planning.counting import PlannedModel
from tests.model.weights.quantised.test_checkpoints import write
from tests.train.project import decided

pytest.importorskip("peft")


ONE_ROW = {"tokens_per_step": 16, "micro_batch_size": 1, "activation_budget": 1.0, "compile": "off"}
"""Nothing that a plan would look for."""


def config_of(place: Path, base: str) -> Config:
    config = build_config(
        {
            "model": {"path": str(place)},
            "data": {"path": "none", "seq_len": 16},
            "train": {"precision": "bf16", "micro_batch_size": 1, "grad_accumulation": 2, "compile": "off"},
            "lora": {"r": 4, "base": base},
        }
    )
    return decided(config)


def counted(place: Path, base: str = AS_STORED, folder: Path | None = None) -> Anatomy:
    return PlannedModel(str(place), folder, NOBODY.progress).count(config_of(place, base), "accelerator")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("mxfp4", tmp_path_factory.mktemp("planned") / "model")


def test_chunks_of_experts_are_refused_beside_codes(place: Path) -> None:
    """A plan says so, before any weight is read."""
    for base in (AS_STORED, DEQUANTISED):
        config = config_of(place, base)
        chunked = config.model_copy(
            update={"memory": config.memory.model_copy(update={"expert_chunks": 100})}
        )
        spec, anatomy = load_machine("rtx-4090"), counted(place, base)
        if base == AS_STORED:
            with pytest.raises(ConfigError, match="is 100, but the experts are kept in the codes"):
                make_request(chunked, anatomy, spec)
        else:
            found = make_request(chunked, anatomy, spec).choice.expert_chunks
            experts = anatomy.layers[0].experts
            assert experts is not None
            assert found == experts.number


def test_a_configuration_is_planned_as_its_files(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes((place / "config.json").read_bytes())
    by_files, by_config, values = counted(place), counted(file), counted(place, DEQUANTISED)
    whole = Choice().with_defaults(0)
    sizes = [BlockSums.of(anatomy, whole).totals.sizes for anatomy in (by_files, by_config, values)]
    assert sizes[0] == sizes[1]
    assert by_files.keeps_codes
    assert not values.keeps_codes
    assert [size.working_bytes for size in sizes[0]] == [size.working_bytes for size in sizes[2]]
    assert sum(size.kept_bytes for size in sizes[0]) < 0.8 * sum(size.kept_bytes for size in sizes[2])
    assert read_anatomy(json.loads(json.dumps(anatomy_json(by_files)))).keeps_codes


def test_counts_are_made_again_where_the_files_are_others(place: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    for number in (1, 1):
        counted(place, folder=counts)
        assert len(list(counts.glob("*.json"))) == number
    os.utime(place / "model.safetensors", (1, 1))
    counted(place, folder=counts)
    assert len(list(counts.glob("*.json"))) == 2


def test_a_plan_prices_the_link_and_the_decoding_and_uses_no_drives(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_machine("rtx-5090")
    assert spec.drives is not None
    moved, seconds = {}, {}
    for base in (DEQUANTISED, AS_STORED):
        request = make_request(config_of(place, base), counted(place, base), spec)
        plan = make_plan(request)
        assert ("codes" in {pool.name for pool in plan.pools}) is (base == AS_STORED)
        assert request.may_use_drives is (base == DEQUANTISED)
        choice = replace(plan.choice, resident_layers=0, outer_resident=False, mirror_resident=True)
        moved[base] = request.step(choice).moved_bytes["fetch"]
        seconds[base] = request.step(choice).step_s
        monkeypatch.setattr(pricing, "DECODING_PASSES", 10**9)
        assert (request.step(choice).step_s > 2 * seconds[base]) is (base == AS_STORED)
        monkeypatch.undo()
    assert moved[AS_STORED] < 0.8 * moved[DEQUANTISED]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("lora", "is_said"), [({"r": 4}, True), ({"r": 4, "base": AS_STORED}, False), ({}, False)]
)
def test_a_base_that_could_stay_in_its_codes_is_named(
    lora: dict[str, Any], is_said: bool, place: Path
) -> None:
    raw = {"lora": lora, "data": {"seq_len": 16}, "train": ONE_ROW}
    asked = ask(raw, load_machine("rtx-5090"), source="a test", hf_config=place / "config.json")
    said = [note for note in asked.notes if "lora.base=as_stored keeps it in its codes" in note]
    assert len(said) == is_said


def test_what_is_read_of_a_quantised_model_is_said(place: Path) -> None:
    raw = {
        "model": {"path": str(place)},
        "data": {"seq_len": 16},
        "train": ONE_ROW,
    }
    machine = load_machine("rtx-5090")
    assert machine.drives is not None
    (said,) = [note for note in ask(raw, machine, source="a test").notes if note.startswith("loading reads")]
    nbytes = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    seconds = nbytes / machine.drives.read_bytes_per_s
    assert said.startswith(
        f"loading reads {binary(nbytes)} of mxfp4, {seconds:.1f} s at the rate of its drives"
    )


@pytest.mark.parametrize("machine", ["8xh100", "4xrtx-4090"])
def test_several_gpus_are_refused(machine: str, place: Path) -> None:
    anatomy, config = counted(place), config_of(place, AS_STORED)
    with pytest.raises(ConfigError, match="ranks cannot share; use one GPU"):
        make_request(config, anatomy, load_machine(machine))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "is in gptq and has nothing to be kept"),
        (None, "is not quantised and has nothing to be kept"),
    ],
)
def test_a_model_of_another_format_is_refused(
    changes: dict[str, Any] | None, words: str, place: Path, tmp_path: Path
) -> None:
    values = json.loads((place / "config.json").read_text())
    values["quantization_config"] = changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=words):
        counted(tmp_path / "config.json")
