"""What a plan takes its time for is said once it has taken some, in whole lines, and not before."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.train.screen import status_line as progress
from megatrain.train.screen.status_line import Doing
from tests.families import FAMILIES


def test_nothing_is_said_of_what_is_soon_done() -> None:
    said: list[str] = []
    with Doing("plan", said.append, after_s=1e6) as doing:
        doing("counting")
        doing("searching")
    assert said == []


def test_what_goes_on_is_said_and_then_what_follows() -> None:
    said: list[str] = []
    spoken = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        spoken.set()

    with Doing("plan", say, after_s=0.01) as doing:
        doing("counting")
        assert spoken.wait(60)
        doing("searching")
    assert [line.partition(" (")[0] for line in said] == ["plan: counting", "plan: searching"]


def test_what_is_known_to_take_long_is_said_at_once_and_once() -> None:
    said: list[str] = []
    with Doing("train", said.append, after_s=0.01) as doing:
        doing.at_once("loading torch")
        assert said == ["train: loading torch"]
        deadline_s = time.monotonic() + 60
        while not doing._is_late and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert said == ["train: loading torch"]
        doing("reading the data")
    assert [line.partition(" (")[0] for line in said[1:]] == ["train: reading the data"]


def test_what_is_said_at_once_is_said_again_when_it_goes_on() -> None:
    said: list[str] = []
    again = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            again.set()

    with Doing("train", say, after_s=0.0, every_s=0.01) as doing:
        doing.at_once("loading torch")
        assert again.wait(60)
    assert said[1].partition(" (")[0] == "train: loading torch"


def test_what_takes_long_is_said_again_until_it_is_over() -> None:
    """Nobody is left without a line for more than so many seconds, however long one thing takes."""
    said: list[str] = []
    third = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            third.set()

    with Doing("plan", say, after_s=0.0, every_s=0.01) as doing:
        doing("searching")
        assert third.wait(60)
    assert {line.partition(" (")[0] for line in said} == {"plan: searching"}


def test_progress_is_on_standard_error_and_never_in_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    arguments = ["plan", "--model", str(tmp_path / "model"), "--machine", "rtx-4090"]
    arguments += ["--seq-len", "64", "train.micro_batch_size=1"]
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    output = capsys.readouterr()
    assert json.loads(output.out)["fits"]
    lines = output.err.splitlines()
    assert all(line.startswith("plan: ") for line in lines)
    assert any("searching choices" in line for line in lines)
