"""The room of a run directory is known before the first step: refused, warned of, or enough to the byte."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain import cli
from megatrain.train import loop
from megatrain.train.loop import train
from megatrain.train.planning.space import Space
from megatrain.train.saves import saves
from tests.train.faults.test_recovery import start_command
from tests.train.project import make_config

STATVFS = os.statvfs


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int, *, blocks: int = 1 << 40) -> None:
    """Let every file system have so many bytes free."""
    found = SimpleNamespace(f_bavail=nbytes, f_frsize=1, f_blocks=blocks)
    monkeypatch.setattr(os, "statvfs", lambda path: found)


def space(**changes: Any) -> Space:
    """A run that keeps two checkpoints of 1,000 bytes with a model of 300."""
    values: dict[str, Any] = {
        "out": Path("run"),
        "checkpoint_bytes": 1000,
        "model_bytes": 300,
        "other_bytes": 7,
        "have_bytes": 10_000,
        "keep_last": 2,
        "num_more": 0,
        "interval_s": 600.0,
        "wait_s": 1.0,
        "num_saves": None,
    }
    return Space(**values | changes)


@pytest.mark.parametrize(
    ("changes", "need", "least"),
    [
        ({}, 3007, 2007),
        ({"num_more": 1}, 4007, 2007),
        ({"keep_last": 1}, 2007, 2007),
        ({"num_saves": 3}, 3007, 2007),
        ({"num_saves": 2}, 2307, 2007),
        ({"num_saves": 1}, 1307, 1307),
        ({"keep_last": None, "num_saves": 5}, 5307, 2007),
        ({"keep_last": None}, None, 2007),
    ],
)
def test_need_is_what_lies_there_at_once(changes: dict[str, Any], need: int | None, least: int) -> None:
    assert (space(**changes).need_bytes, space(**changes).least_bytes) == (need, least)
    if need is not None:
        exact = space(have_bytes=need, **changes)
        assert (exact.problem, exact.warning) == ("", "")
        short = space(have_bytes=need - 1, **changes)
        assert bool(short.problem) == (need == least)
        assert bool(short.warning) == (need != least)
    assert space(have_bytes=least - 1, **changes).problem
    assert not space(have_bytes=least, **changes).problem


def test_sentences_have_both_figures_and_a_way_out() -> None:
    gib = 1 << 30
    sizes = {"checkpoint_bytes": 10 * gib, "model_bytes": 2 * gib, "other_bytes": 0}
    assert space(**sizes, have_bytes=19 * gib).problem == (
        "the file system of run has room for 19.0 GiB, but the run needs 20.0 GiB there: two checkpoints of "
        "10.0 GiB, since one stays whole while the next is written. Make room there, or name another "
        "directory with out (--out)"
    )
    assert space(**sizes, have_bytes=41 * gib, keep_last=5).warning == (
        "the file system of run has room for 41.0 GiB, but checkpoint.keep_last=5 takes 60.0 GiB while a "
        "checkpoint of 10.0 GiB is saved, so saves will fail: set checkpoint.keep_last to 3 or less, make "
        "room there, or name another directory with out (--out)"
    )
    tight = space(**sizes, have_bytes=21 * gib, keep_last=1, num_more=1)
    assert "set eval.keep_best=false" in tight.warning
    everything = space(**sizes, have_bytes=45 * gib, keep_last=None)
    assert "set checkpoint.keep_last to 3 or less" in everything.warning


def test_a_run_without_room_for_two_checkpoints_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, log={"report": False})
    free(monkeypatch, 1_100_000)  # a checkpoint of 601,728 bytes fits, and not two
    with monkeypatch.context() as patch:
        patch.setattr("megatrain.train.run.make_engine", lambda *_, **__: pytest.fail("memory was taken"))
        assert start_command(tmp_path, config) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        f"error: the file system of {tmp_path}/run has room for 1.05 MiB, but the run needs 1.17 MiB there: "
        "two checkpoints of 587.6 KiB, since one stays whole while the next is written, and 24.0 KiB for all "
        "else. Make room there, or name another directory with out (--out)"
    )
    assert not (tmp_path / "run/checkpoints").exists()


def test_the_plan_says_the_same_and_a_resumed_run_counts_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, log={"report": False}, train={"steps": 8})
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json")))

    def plan() -> tuple[object, str, dict[str, Any]]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        with pytest.raises(SystemExit) as end:
            cli.main(["plan", str(file), "--json"])
        shown = capsys.readouterr()
        return end.value.code, shown.err, json.loads(shown.out)["space"]

    free(monkeypatch, 1_100_000)
    code, said, found = plan()
    assert code == 3
    assert "error: the file system of" in said
    assert (found["checkpoint_bytes"], found["have_bytes"]) == (601_728, 1_100_000)
    assert found["least_bytes"] == 2 * 601_728 + 8 * 2048
    assert found["problem"] in said
    monkeypatch.setattr(os, "statvfs", STATVFS)
    train(config)
    free(monkeypatch, 700_000)  # with two checkpoints and the model in hf/ that are there, it is enough
    code, said, found = plan()
    assert (code, found["problem"]) == (0, None)
    there = sum(
        path.lstat().st_blocks * 512
        for kind in ("checkpoints", "hf")  # logs and an old report stay
        for path in (tmp_path / "run" / kind).rglob("*")
        if path.is_file()
    )
    assert found["have_bytes"] == 700_000 + there
    file.write_text(file.read_text().replace('"report": false', '"report": true'))
    with_report = plan()[2]
    assert with_report["least_bytes"] - found["least_bytes"] == 5 << 20


def test_a_file_system_that_does_not_say_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 0, blocks=0)
    train(make_config(tmp_path, log={"report": False}, train={"steps": 1}, optim={"warmup_steps": 0}))


def test_fewer_than_are_kept_is_a_warning_and_what_is_said_is_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(monkeypatch, 2_000_000)
    config = make_config(
        tmp_path, log={"report": False}, checkpoint={"every": 2, "keep_last": 4, "background": False}
    )
    sizes = []
    saved = saves.save

    def measured(root: Path, **given: Any) -> Path:
        path = saved(root, **given)
        tensors = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
        sizes.append(tensors)
        return path

    monkeypatch.setattr(saves, "save", measured)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        train(config)
    (said,) = [text for text in caplog.messages if text.startswith("the file system of")]
    assert re.search(
        r"checkpoint\.keep_last=4 takes 2\.\d+ MiB while a checkpoint of 587\.6 KiB is saved", said
    )
    assert "set checkpoint.keep_last to 2 or less" in said
    assert all(601_728 < size < 1.06 * 601_728 for size in sizes), "headers are beside the tensors"


def test_state_on_drives_in_the_same_file_system_needs_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives = {"tiers": {"ram": 1_400_000, "nvme": [str(tmp_path / "drive")]}}
    config = make_config(
        tmp_path, log={"report": False}, memory={**drives, "activations": "recompute"}, train={"steps": 4}
    )
    found = []
    space_of = loop.space_of

    def kept(*args: Any, **given: Any) -> Space | None:
        found.append((args[2].tier_bytes("nvme"), space_of(*args, **given)))
        return found[-1][1]

    monkeypatch.setattr(loop, "space_of", kept)
    train(config)
    ((nbytes, of_run),) = found
    assert nbytes > 0
    assert of_run is not None
    assert of_run.other_bytes == nbytes + 4 * 2048
