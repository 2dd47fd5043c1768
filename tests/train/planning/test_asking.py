"""`plan`, `train --plan-only` and `train --dry-run` of a run say the same, with data and without."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatrain.cli import main
from megatrain.config import build_config
from megatrain.hardware import MemoryLimit
from megatrain.stream import machine
from megatrain.train.loop import train
from megatrain.train.planning import allocation
from megatrain.train.planning import plan_run as planning
from megatrain.train.planning.lately import Lately
from megatrain.train.screen import status_line
from tests.expert_families import APART
from tests.searches import planned_for_a_moment
from tests.train.project import write_corpus, write_model_config

SHARED = Path(__file__).parents[4] / "shared/data"
needs_configs = pytest.mark.skipif(
    not (SHARED / "configs").is_dir(), reason="no configurations of real models in ../shared/data/configs"
)


@pytest.fixture(autouse=True)
def _a_search_of_its_own(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """No counts of the user; plans and runs search alike; no word of how long that takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(status_line, "AFTER_S", 1e6)
    how_fast = request.node.get_closest_marker("parity") is not None
    with nullcontext() if how_fast else planned_for_a_moment():
        monkeypatch.setattr(planning, "make_plan", allocation.make_plan)
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model without weights: no command but `train` itself can ask for them."""
    return write_model_config(tmp_path / "model", max_position_embeddings=64, vocab_size=300)


def test_a_plan_for_this_computer_has_the_room_of_the_drives_that_are_named(
    model: Path, tmp_path: Path, said: Callable[..., str]
) -> None:
    """Of a folder that is not there yet, the room of the parent; both are on one drive."""
    tiers = f"memory.tiers={{ram: 1GiB, nvme: [{tmp_path / 'one' / 'deep'}, {tmp_path}]}}"
    found = json.loads(said("plan", "--json", f"model.path={model}", "model.init=random", tiers))
    assert found["limits"]["nvme"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


def test_a_plan_of_adapters_beside_experts_says_what_updates_and_what_has_none(
    tmp_path: Path, said: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    config = APART["gpt_oss"]()
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    arguments = ["--hf-config", tmp_path / "config.json", "--machine", "cpu-laptop", "--nvme", "0"]
    arguments += ["data.seq_len=16", "train.micro_batch_size=1", "train.grad_accumulation=2"]
    text = " ".join(said("plan", *arguments, "lora.r=4").split())
    assert re.search(r"all of them stream, but only the [\d.]+ K that are trained update", text), text
    assert "puts no adapter on experts (mlp.experts.gate_up_proj, mlp.experts.down_proj)" in caplog.text
    text = " ".join(said("plan", *arguments).split())
    assert "all of them stream and update" in text


def test_chunks_of_experts_of_a_dense_model_are_refused(model: Path, said: Callable[..., str]) -> None:
    """By the plan, as by the training."""
    text = said("plan", f"model.path={model}", "model.init=random", "memory.expert_chunks=4", code=2)
    assert "expert_chunks is 4, but no layer of the model has experts; use expert_chunks=1" in text


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.txt")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command and returns what it prints."""

    def run(*arguments: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in arguments])
        output = capsys.readouterr()
        assert int(ended.value.code or 0) == code, output.err
        return output.out if code == 0 else output.err

    return run


def row(text: str, name: str) -> str:
    """Return a row of a plan, its lines joined."""
    lines = iter(text.splitlines())
    found = next(line for line in lines if line.startswith(f" {name} "))
    for line in lines:
        if not line.startswith("         "):
            break
        found += f" {line.strip()}"
    return found.removeprefix(f" {name}").strip()


def test_a_plan_with_data_is_that_of_the_run_on_any_machine(
    said: Callable[..., str], model: Path, corpus: Path, tmp_path: Path
) -> None:
    machine = ("--machine", "rtx-4090", "--ram", "64GiB")
    settings = (f"data.path={corpus}", "train.epochs=2", "model.init=random", f"out={tmp_path / 'run'}")
    plan = said("plan", "--model", model, *machine, *settings)
    assert said("train", "--model", model, *machine, *settings, "--plan-only") == plan
    assert "FITS" in row(plan, "verdict")
    rows = int(row(plan, "data").split(" sequences")[0].split()[-1])
    tokens, steps = 64 * 2, 2 * -(-rows // 2)  # a step of four rows would be one of fewer than 100
    assert 2 * -(-rows // 4) < 100 <= steps
    assert f"= {tokens:,} tokens" in row(plan, "step")
    assert row(plan, "total").startswith(f"{tokens * steps:,} tokens: {steps:,} steps, ")
    assert not (tmp_path / "run").exists()


def test_a_budget_of_layers_that_are_not_compiled_is_said_to_do_nothing(
    said: Callable[..., str], model: Path
) -> None:
    machine = ("--machine", "rtx-4090", "--seq-len", "64", "train.activation_budget=0.5")
    note = "train.activation_budget is 0.5, but layers are not compiled: it does nothing"
    plans = [said("plan", "--model", model, *machine, f"train.compile={how}") for how in ("off", "on")]
    assert [note in " ".join(plan.split()) for plan in plans] == [True, False]


def test_on_this_machine_plan_plan_only_and_dry_run_expect_the_same_step(
    said: Callable[..., str], model: Path, corpus: Path, tmp_path: Path
) -> None:
    settings = (f"data.path={corpus}", "train.steps=40", "model.init=random", f"out={tmp_path / 'run'}")
    plan = said("plan", "--model", model, *settings)
    plan_only = said("train", "--model", model, *settings, "--plan-only")
    for name in ("model", "step", "data", "time", "speed", "eval", "total", "saving", "setting", "note"):
        assert row(plan_only, name) == row(plan, name)
    found = json.loads(said("plan", "--model", model, *settings, "--json"))
    tried = said("train", "--model", model, *settings, "--dry-run")
    assert next(line for line in tried.splitlines() if line.startswith("step")).split()[1:3] == [
        f"{found['step_s']:.4g}",
        "s",
    ]
    assert not (tmp_path / "run").exists()


def test_data_that_are_not_here_are_planned_without_and_never_trained_without(
    said: Callable[..., str], model: Path, corpus: Path, tmp_path: Path
) -> None:
    size = "train.micro_batch_size=1"
    asked = ("--model", model, "data.path=/nowhere/at-all.jsonl", "--machine", "rtx-4090", size)
    plan = said("plan", *asked)
    gone = "data.path /nowhere/at-all.jsonl is not on this machine, so the run is planned as one with"
    assert gone in " ".join(plan.split())
    assert "= 131,072 tokens" in row(plan, "step")
    here = said("plan", *asked[:2], f"data.path={corpus}", *asked[3:])
    mute = "comes without a tokenizer for the data (data.tokenizer names one), so the run is planned as one"
    assert mute in " ".join(here.split())
    error = said("train", *asked, "--plan-only", f"out={tmp_path / 'run'}", code=4)
    assert "/nowhere/at-all.jsonl" in error


def test_whoever_makes_a_step_small_reads_what_it_costs(said: Callable[..., str], tmp_path: Path) -> None:
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 4000}
    model = write_model_config(tmp_path / "wide", max_position_embeddings=4096, **wide)
    asked = (
        "plan",
        "--model",
        model,
        "--machine",
        "rtx-3080",
        "data.seq_len=512",
        "train.micro_batch_size=1",
    )
    hint = row(said(*asked, "train.grad_accumulation=1"), "faster")
    found = re.fullmatch(
        r"a step of 512 tokens is small: what takes longest is backward \+ optimizer; "
        r"train\.grad_accumulation=(\d+) makes training (\d+\.\d) times faster",
        hint,
    )
    assert found, hint
    assert float(found[2]) > 4
    assert f"train.tokens_per_step={512 * int(found[1])} makes" in row(
        said(*asked, "train.tokens_per_step=512"), "faster"
    )
    for settings in ((), (f"train.grad_accumulation={found[1]}",)):
        assert "\n faster " not in said(*asked, *settings)


def test_options_of_a_plan_are_refused_where_none_is_asked_for(
    said: Callable[..., str], model: Path, corpus: Path
) -> None:
    asked = ("train", "--model", model, "--data", corpus)
    assert "add --plan-only" in said(*asked, "--machine", "rtx-4090", code=2)
    assert "keep one" in said(*asked, "--plan-only", "--dry-run", code=2)


def test_the_plan_of_a_run_that_goes_on_is_of_the_step_that_it_was_begun_with(
    said: Callable[..., str], model: Path, corpus: Path, tmp_path: Path
) -> None:
    raw = {
        "model": {"path": str(model), "init": "random"},
        "data": {"path": str(corpus), "seq_len": 32},
        "train": {"steps": 1, "tokens_per_step": 512, "micro_batch_size": 2, "device": "cpu"},
        "optim": {"warmup_steps": 0},
        "log": {"progress": "none"},
        "out": str(tmp_path / "run"),
    }
    train(build_config(raw))
    asked = ("--model", model, "--data", corpus, "model.init=random", "--plan-only", "--machine", "rtx-4090")
    plan = said("train", *asked, "--out", tmp_path / "run")
    assert row(plan, "step").startswith("8 x 2 x 32 = 512 tokens; fp32, ")
    assert not row(said("train", *asked, "--out", tmp_path / "new"), "step").startswith("8 x 2 x 32")


def test_what_was_measured_is_good_for_an_hour(tmp_path: Path) -> None:
    measured: list[float] = []

    def measure() -> float:
        measured.append(0.0)
        return float(len(measured))

    for _ in range(2):
        assert Lately(tmp_path).number(measure, what="products", threads=1) == 1.0
    assert Lately(tmp_path).number(measure, what="products", threads=2) == 2.0
    assert Lately(None).number(measure, what="products", threads=1) == 3.0
    for file in tmp_path.iterdir():
        os.utime(file, (time.time() - 3601,) * 2)
    assert Lately(tmp_path).number(measure, what="products", threads=1) == 4.0
    assert Lately(tmp_path).number(lambda: None, what="layers") is None
    assert Lately(tmp_path).number(measure, what="layers") is None  # that there is none is known too


def test_memory_that_was_free_lately_is_planned_with_while_it_is_nearly_what_is_free(tmp_path: Path) -> None:
    free = [1000, 1050, 1111, 1112, 1100, 1099, 1150]
    found = [Lately(tmp_path).free_bytes(now) for now in free]
    assert found == [1000, 1000, 1000, 1112, 1100, 1099, 1099]
    os.utime(next(iter(tmp_path.iterdir())), times=(time.time() - 4000,) * 2)
    assert Lately(tmp_path).free_bytes(1150) == 1150
    assert Lately(None).free_bytes(1000) == 1000


def test_the_plan_of_this_machine_stays_when_other_programs_give_memory_back(
    said: Callable[..., str], model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = iter([(20 << 30, "x"), (21 << 30, "x")])
    shown = []
    for command in (("plan",), ("train", "--plan-only")):
        available = MemoryLimit(*next(limits))
        monkeypatch.setattr(machine, "host_memory", lambda available=available: available)
        asked = (*command, "--model", model, f"data.path={corpus}", f"out={tmp_path / 'run'}")
        shown.append(said(*asked, "train.device=cpu", "train.micro_batch_size=1", "model.init=random"))
    assert shown[0] == shown[1]
    assert "(20 GiB) of host memory" in shown[0]


@needs_configs
@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "machine", "ram", "tokens_per_s"),
    [("Qwen2.5-7B", "rtx-4090", "128GiB", 2_200), ("Llama-3.1-8B", "h100", "512GiB", 9_000)],
)
def test_models_of_today_are_planned_alike_and_fast_at_defaults(
    said: Callable[..., str], tmp_path: Path, name: str, machine: str, ram: str, tokens_per_s: float
) -> None:
    """Source: first use of the 7B was planned at 2,474 tokens/s, and trained at 100, for other defaults."""
    rows = pa.array([[5 + number % 1000] * 2000 for number in range(10_000)], type=pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "rows.parquet")
    shutil.copytree(SHARED / "configs" / name, tmp_path / "model")
    asked = (
        *("--model", tmp_path / "model", "--machine", machine, "--ram", ram),
        f"data.path={tmp_path / 'rows.parquet'}",
        f"data.tokenizer={SHARED / 'stories260K/hf'}",
        f"out={tmp_path / 'run'}",
    )
    plan = said("plan", *asked)
    assert said("train", *asked, "--plan-only") == plan
    assert "20,000,000 tokens" in row(plan, "data")
    speed = float(row(plan, "speed").split()[0].replace(",", ""))
    assert speed >= tokens_per_s
    alone = said("plan", *(each for each in asked if not str(each).startswith("data.")))
    assert float(row(alone, "speed").split()[0].replace(",", "")) == pytest.approx(speed, rel=0.1)
