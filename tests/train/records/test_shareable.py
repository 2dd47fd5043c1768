"""Nothing that a user may share names their home directory, their webhook or their command line."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from megatrain.train.records.shareable import without_home
from megatrain.train.resume.changes import changed_settings
from tests.train.project import make_config
from tests.train.test_adapters import write_base

SECRETS = (b"TOPSECRET42", b"somebody", b"--told-to-nobody")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "somebody"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "argv", ["megatrain", "train", "--told-to-nobody"])
    return home


def told(places: list[Path]) -> list[str]:
    """Return the files below some places in which a secret is."""
    files = [path for place in places for path in ([place] if place.is_file() else place.rglob("*"))]
    files = [path for path in files if path.is_file()]
    assert files
    return [str(path) for path in files if any(secret in path.read_bytes() for secret in SECRETS)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["model", "adapters"])
def test_what_a_run_leaves_to_be_shared_tells_nothing_of_its_user(
    home: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = {"webhook": "http://127.0.0.1:9/hooks/TOPSECRET42", "report": True, "to": []}
    settings: dict[str, Any] = {
        "train": {"steps": 2},
        "optim": {"warmup_steps": 1},
        "checkpoint": {"every": 1, "keep_last": None},
        "log": log,
    }
    if kind == "adapters":
        settings |= {
            "lora": {"r": 2},
            "model": {"init": "pretrained", "path": str(write_base(home) / "model")},
        }
    config = make_config(home, **settings)
    run = train(config)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        export_run(run, tmp_path / "out")
    manifests = sorted((run / "checkpoints").glob("*/MANIFEST.json"))
    assert len(manifests) == 2
    shared = [run / name for name in ("report.html", "env.json", "plan.json")]
    hf = [path for path in (run / "hf").iterdir() if path.name != "adapter_config.json"]
    assert told([*shared, *manifests, *hf, tmp_path / "out"]) == []
    assert "hooks/TOPSECRET42" in (run / "config.yaml").read_text()  # the run itself needs it
    meta = json.loads(manifests[-1].read_bytes())["meta"]
    assert meta["config"]["out"] == "~/run"
    assert changed_settings(meta["config"], config) == []
    if kind == "adapters":
        base = json.loads((tmp_path / "out/adapter_config.json").read_bytes())["base_model_name_or_path"]
        assert base == "~/model"
        assert "names the base as ~/model" in caplog.text


def test_only_whole_names_are_the_home_directory(home: Path) -> None:
    texts = [f"{home}/a: {home}", f"{home}2/a", {f"{home}": [f"file://{home}/b"]}, 3]
    assert without_home(texts) == ["~/a: ~", f"{home}2/a", {"~": ["file://~/b"]}, 3]
    others = [f"/data{home}/a", f"{home}.old/a", f"there is no {home}.", f"({home})"]
    assert without_home(others) == [*others[:2], "there is no ~.", "(~)"]
