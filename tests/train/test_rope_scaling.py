"""A run with rows beyond its model's context: with a scaling it trains, exports, resumes and is planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatrain.cli import main
from megatrain.config import Config
from megatrain.errors import CheckpointError, ConfigError
from megatrain.train.commands.evaluate import evaluate_run
from megatrain.train.commands.inspect_model import inspect_model
from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from tests.train.project import make_config, write_model_config

YARN = {"rope_type": "yarn", "factor": 4}
WRITTEN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make(root: Path, scaling: dict[str, Any] | None = YARN, *, out: str = "run", **sections: Any) -> Config:
    sections.setdefault("data", {"seq_len": 128})
    train = {"steps": 2, "grad_accumulation": 1, **sections.pop("train", {})}
    model = {"rope_scaling": scaling, **sections.pop("model", {})}
    return make_config(
        root, out, model=model, train=train, optim={"warmup_steps": 0}, checkpoint={"every": 1}, **sections
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of two steps, with rows of twice the model's context."""
    root = tmp_path_factory.mktemp("rope")
    train(make(root))
    return root


def test_the_model_is_written_with_its_scaling(root: Path) -> None:
    for place in (root / "run/hf", root / "run/checkpoints/step-00000001"):
        config = json.loads((place / "config.json").read_text())
        assert config["rope_parameters"] == WRITTEN
        assert config["max_position_embeddings"] == 256
        assert AutoTokenizer.from_pretrained(place).model_max_length >= 256
    assert "factor 4.0" in (root / "run/hf/README.md").read_text()
    model: Any = AutoModelForCausalLM.from_pretrained(root / "run/hf")
    by_hand = AutoConfig.from_pretrained(
        root / "model", rope_parameters=dict(WRITTEN), max_position_embeddings=256
    )
    expected: Any = AutoModelForCausalLM.from_config(by_hand)
    assert torch.equal(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.attention_scaling == expected.model.rotary_emb.attention_scaling > 1


def test_a_run_goes_on_with_its_scaling_and_no_other(root: Path) -> None:
    three = {"steps": 3}
    for other, said in (
        (None, "null"),
        ({**YARN, "factor": 8}, "factor: 8"),
        ({"type": "linear", "factor": 4}, "linear"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"model.rope_scaling={{rope_type: yarn, factor: 4.0}}, not .*{said}"
        ):
            train(make(root, other, train=three))
    train(make(root, train=three))
    rows = (root / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]
    assert json.loads((root / "run/hf/config.json").read_text())["rope_parameters"] == WRITTEN


def test_a_new_run_may_begin_with_the_scaled_model(root: Path) -> None:
    """With the same setting, or with none; a scaling on top of it is refused."""
    scaled = {"path": str(root / "run/hf"), "init": "pretrained"}
    train(make(root, None, out="after", model=scaled, train={"steps": 1}))
    assert json.loads((root / "after/hf/config.json").read_text())["rope_parameters"] == WRITTEN
    train(make(root, out="again", model=scaled, train={"steps": 1}))
    with pytest.raises(ConfigError, match=r"scaled in another way: rope_type yarn, factor 4\.0"):
        train(make(root, {**YARN, "factor": 2}, out="on-top", model=scaled))
    assert not (root / "on-top/checkpoints").exists()


def test_rows_beyond_the_range_are_refused(root: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.seq_len 128 .*context of 64 tokens; use 64 or less, or model\.rope_sc"
    ):
        train(make(root, None, out="long"))
    with pytest.raises(
        ConfigError, match=r"data\.seq_len 257 .*256 tokens \(yarn, factor 4\); .*factor: 5}'$"
    ):
        train(make(root, out="long", data={"seq_len": 257}))


def test_a_run_s_model_is_evaluated_and_inspected_with_its_scaling(root: Path) -> None:
    (found,) = evaluate_run(root / "run", [str(root / "corpus.txt")])
    assert 0 < found.loss < 10
    text = "\n".join(inspect_model(str(root / "run/hf")).lines())
    assert "context     256 tokens; beyond 64, positions are scaled (yarn, factor 4)" in text
    assert "context     64 tokens\n" in "\n".join(inspect_model(str(root / "model")).lines())


def test_adapters_are_merged_into_the_scaled_base(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("peft")
    base = {"path": str(root / "plain/hf"), "init": "pretrained"}
    train(make(root, None, out="plain", data={"seq_len": 64}, train={"steps": 1}))
    config = make(root, out="adapted", model=base, lora={"r": 2}, train={"steps": 1})
    with caplog.at_level("INFO", logger="megatrain"):
        train(config)
    said = caplog.text
    assert "rows of 128 tokens are longer than the 64 that the model takes as it was trained" in said
    assert "which their files do not say: give the base the same rope_parameters" in said
    export_run(root / "adapted", root / "merged", merges=True)
    config_json = json.loads((root / "merged/config.json").read_text())
    assert config_json["rope_parameters"] == WRITTEN
    assert config_json["max_position_embeddings"] == 256
    assert not (root / "adapted/hf/config.json").exists()


# -- plans ---------------------------------------------------------------------------------------------------


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., str]:
    """Runs a command and returns what it prints."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in arguments])
        output = capsys.readouterr()
        assert int(ended.value.code or 0) == code, output.err
        return " ".join((output.out if code == 0 else output.err).split())

    return run


def test_a_plan_says_from_where_on_positions_are_scaled(said: Callable[..., str], tmp_path: Path) -> None:
    model = write_model_config(tmp_path / "model")
    sizes = ("train.tokens_per_step=512", "train.micro_batch_size=1", "train.compile=off")
    asked = ("plan", "--model", model, "--machine", "rtx-4090", *sizes)
    scaled = (*asked, "model.rope_scaling={type: yarn, factor: 4}")
    note = (
        "rows of 128 tokens are longer than the 64 that the model takes as it was trained: its positions are "
        "scaled (yarn, factor 4), for up to 256 tokens"
    )
    assert note in said(*scaled, "--seq-len", 128)
    # the second one reads what was kept
    assert note in json.loads(said(*scaled, "--seq-len", 128, "--json"))["notes"]
    assert "positions are scaled" not in said(*scaled, "--seq-len", 64)
    error = said(*asked, "--seq-len", 128, code=2)
    assert (
        "data.seq_len 128 is beyond the model's context of 64 tokens; use 64 or less, or model.rope" in error
    )
    assert "(yarn, factor 4)" in said(*scaled, "--seq-len", 300, code=2)


def test_a_plan_refuses_a_model_that_cannot_be_scaled(said: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2})
    )
    error = said(
        "plan", "--model", tmp_path, "--machine", "rtx-4090", "rope_scaling={type: yarn, factor: 4}", code=2
    )
    assert "the gpt2 model has no rotary embeddings; leave rope_scaling out" in error
    error = said("plan", "--model", tmp_path, "--machine", "rtx-4090", "model.rope_scaling.factor=4", code=2)
    assert "model.rope_scaling: it has no rope_type" in error
