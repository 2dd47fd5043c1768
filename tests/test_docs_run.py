"""The commands of the quick start and of the page on reports, one after the other, on a tiny model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain.cli import main
from tests.test_docs import ROOT, commands
from tests.train.project import write_corpus, write_model_config

NOT_HERE = {"ui", "doctor"}
"""They end with Ctrl-C, or measure for half a minute; both have tests of their own."""

FEWER = {"--steps": "3", "--max-new-tokens": "4"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages take for granted: a model, a text, and the checkout's configurations."""
    write_model_config(tmp_path / "DIR", max_position_embeddings=256)
    write_corpus(tmp_path / "my.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(words: list[str]) -> int:
    words = [FEWER.get(words[at - 1], word) if at else word for at, word in enumerate(words)]
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.mark.parity  # half a minute; each command alone is tested nearer to what it does
def test_pages_can_be_followed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are drawn first, since `DIR` has none; a recipe for a large model is made smaller."""
    assert run(["train", *_start(), "model.init=random", "out=first"]) == 0
    shutil.copytree(project / "first/hf", project / "DIR", dirs_exist_ok=True)
    assert run(["train", *_start(), "--out", "runs/other", "optim.lr=1e-4"]) == 0
    done = []
    for page in ("quickstart.md", "reports.md"):
        for words in commands(ROOT / "docs" / page, "megatrain"):
            more = ["data.seq_len=64", "train.grad_accumulation=2"] if "--dry-run" in words else []
            if words[0] not in NOT_HERE:
                assert run([*words, *more]) == 0, words
                done.append(words[0])
    assert {"train", "runs", "report", "sample", "export", "plan", "trace"} <= set(done)
    out = capsys.readouterr().out
    assert "verdict FITS" in out
    assert "bound: planned" in out
    assert "optim.lr" in out, "what differs between the two runs"
    assert '"timeline_source": "measured (trace.json)"' in (project / "runs/mine/report.html").read_text()


def _start() -> list[str]:
    return ["--model", "DIR", "--data", "my.txt", "--steps", "3", "--seq-len", "256", "optim.warmup_steps=0"]
