"""What `plan` and `train` say of a plan, and whether a run starts that its drives do not outlive."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.cli import main
from megatrain.config import Config
from megatrain.config.decided import micro_batch_sizes
from megatrain.config.plan import Plan
from megatrain.errors import WearError
from megatrain.hardware import Drives, load_machine, save_machine
from megatrain.plan.search import verdict, wear
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from megatrain.train.commands.dry_run import dry_run
from megatrain.train.planning import micro_batches
from megatrain.train.planning import plan_run as planning
from megatrain.train.planning.allocation import plan_memory
from megatrain.train.planning.counting import PlannedModel
from megatrain.train.planning.plan_report import report
from megatrain.train.planning.plan_run import plan_run
from megatrain.train.run import prepare
from tests.train.project import make_config, write_model_config


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best choices that are found soon."""
    for module in (planning, verdict, wear):
        monkeypatch.setattr(module, "make_plan", _soon)
    monkeypatch.setattr(micro_batches, "micro_batch_sizes", _largest)


def _largest(config: Config, num_runs: int) -> list[int]:
    """Return one size of micro-batches, so that none is looked for."""
    return micro_batch_sizes(config, num_runs)[-1:]


def _soon(request: Request, *, budget: int = 0, enough_s: float = 0.0) -> Plan:
    return make_plan(request, budget=400, enough_s=enough_s)


ENDURANCE = {"lasts": 1e18, "unknown": None, "worn": 1e12, "no drives": None}
"""What the drives of a machine bear whose memory does not hold the state of a model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    return write_model_config(place, hidden_size=512, intermediate_size=1024, num_hidden_layers=6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ENDURANCE)
def test_plan_says_the_verdict_in_words_as_json_and_by_its_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, name: str
) -> None:
    drives = Drives(nbytes=10**12, read_bytes_per_s=6e9, write_bytes_per_s=3e9)
    has = None if name == "no drives" else replace(drives, rated_bytes_written=ENDURANCE[name])
    file = tmp_path / "machine.json"
    save_machine(replace(load_machine("rtx-3080").with_ram(700 << 20), drives=has), file)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "plan",
                "--model",
                str(model),
                "--machine",
                str(file),
                "--seq-len",
                "64",
                "--tokens",
                "1B",
                "--json",
                "memory.mirror_resident=true",
            ]
        )
    found = json.loads(capsys.readouterr().out)
    raw = {
        "model": {"path": str(model)},
        "data": {"seq_len": 64},
        "memory": {"mirror_resident": True},
    }
    planned = plan_run(raw, load_machine(file), source="test", tokens=10**9)
    text = " ".join(report(planned).split())
    said = found["verdict"]
    assert said == planned.verdict.json() | {"with_less": said["with_less"]}
    assert f" verdict {said['text']}" in text
    assert ended.value.code == said["exit_code"] == {"worn": 9, "no drives": 3}.get(name, 0)
    if name == "no drives":
        assert said["kind"] == "does_not_fit"
        return
    if name == "worn":
        assert said["kind"] == "wears_out"
        assert 0 < said["wear"]["day"] < said["wear"]["num_days"]
        assert "memory.accept_wear=true" in text
        assert "GiB: nothing is written to drives" in text or "MiB: nothing is written to drives" in text
    else:
        assert said["wear"] is None
        assert "WEARS" not in text
    assert said["endurance_known"] == (name != "unknown")
    assert ("how long the drives last is not known" in text) == (name == "unknown")


def sections(root: Path, **memory: Any) -> dict[str, Any]:
    """Return settings of a run whose drive is rated for a gigabyte, and which writes more."""
    return {
        "train": {"steps": 100_000, "precision": "bf16", "device": "emulated"},
        "memory": {
            "activations": "recompute",
            "tiers": {"ram": 540_000, "nvme": [str(root / "drive")]},
            **memory,
        },
        "hardware": {"rated_bytes_written": "1GB"},
    }


def in_a_file(config: Config, file: Path) -> str:
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return str(file)


def test_train_starts_a_run_that_wears_out_its_drive_only_if_told_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = make_config(tmp_path, **sections(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["train", in_a_file(config, tmp_path / "run.yaml")])
    error = capsys.readouterr().err
    assert ended.value.code == 9, error
    assert "WEARS OUT the drive on day" in error
    assert "; use train.tokens_per_step=" in error
    assert "or optim.state=bf16 memory.tiers=auto (not exact): nothing is written to drives" in error
    assert error.rstrip().endswith("memory.accept_wear=true to train all the same")
    assert not (tmp_path / "drive").exists()
    assert not list((tmp_path / "run").glob("*.jsonl"))
    lines: list[str] = []
    run = prepare(make_config(tmp_path, **sections(tmp_path, accept_wear=True)), show=lines.append)
    run.engine.close(removes=True)
    (memory,) = (line for line in lines if line.startswith("memory: "))
    assert ": FITS, WEARS OUT the drive on day" in memory
    assert run.planned is not None
    assert run.planned.verdict.exit_code == 9


def test_a_resumed_run_counts_what_it_has_written(tmp_path: Path) -> None:
    """Half of its steps would not use up the drive; the first half has."""
    asked = sections(tmp_path)
    asked["hardware"]["rated_bytes_written"] = "1000TB"
    config = make_config(tmp_path, **asked)
    model = PlannedModel(config.model.path, None, lambda doing: None)
    first = plan_memory(config, model, None, num_steps=50_000)
    assert first is not None
    half = 50_000 * first.plan.bytes_per_step["drive_written"]
    hardware = config.hardware.model_copy(update={"rated_bytes_written": int(1.5 * half)})
    config = config.model_copy(update={"hardware": hardware})
    assert plan_memory(config, model, None, num_steps=50_000) is not None
    earlier = {"step": 50_000, "drive_written_bytes": half}
    with pytest.raises(WearError, match="WEARS OUT the drive on day"):
        plan_memory(config, model, None, num_steps=100_000, earlier=earlier)


def test_two_steps_of_a_dry_run_wear_out_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    dry_run(make_config(tmp_path, **sections(tmp_path)), lines.append)
    assert lines[0].startswith("verdict ")
    assert "WEARS OUT the drive on day" in lines[0]
