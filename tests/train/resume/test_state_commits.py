"""Runs with state on drives: the same bits, and after kill -9 they go on from the last committed step."""

from __future__ import annotations

import json
import logging
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from megatrain.cli import main
from megatrain.config.choice import Choice
from megatrain.errors import CapacityError, CheckpointError, OutputError
from megatrain.plan.search.request import PROGRAM_BYTES, USABLE_HOST
from megatrain.store.drives.record import (
    PREPARED_NAME,
    RECORD_NAME,
    CommitRecord,
    read_record,
    write_record,
)
from megatrain.stream.lanes import EmulatedMachine
from megatrain.stream.lanes.emulated_spec import emulated_spec
from megatrain.stream.machine import common_cpu
from megatrain.train.commands.dry_run import dry_run
from megatrain.train.commands.trace import trace
from megatrain.train.evaluate.losses import Evaluation
from megatrain.train.loop import train
from megatrain.train.planning.allocation import check_allocated, plan_training
from megatrain.train.planning.counting import PlannedModel
from megatrain.train.resume import state_commits
from megatrain.train.resume.state_commits import find_commit, held_by
from megatrain.train.run import prepare
from megatrain.train.saves.saves import Saves
from megatrain.train.step import train_step
from tests.forks import run_module, run_script
from tests.products import every_value
from tests.train.project import make_config, train_until
from tests.train.test_loop import assert_same_runs, rows_of


def sections(root: Path, **changes: Any) -> dict[str, Any]:
    """Return settings of a run of 6 steps whose state is on two drives, and which saves no checkpoint."""
    return {
        "train": {"steps": 6, "precision": "bf16", "device": "emulated"},
        "checkpoint": {"every": None},
        "memory": {
            "activations": "recompute",
            "fragments": False,
            "tiers": {"ram": 540_000, "nvme": [str(root / "drive0"), str(root / "drive1")]},
            **changes,
        },
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in RAM."""
    root = tmp_path_factory.mktemp("whole")
    memory = {"activations": "recompute", "fragments": False}
    train(make_config(root, **{**sections(root), "memory": memory}))
    return root / "run"


def test_a_run_on_drives_that_is_stopped_anywhere_goes_on_to_the_same_bits(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, **sections(tmp_path))
    for step in (0, 2, 3, 5):
        with caplog.at_level(logging.DEBUG, logger="megatrain"):
            train_until(config, step)
        record = read_record(tmp_path / "drive0")
        assert (record.step if record else 0) == step
    with caplog.at_level(logging.DEBUG, logger="megatrain"):
        train(config)
    assert_same_runs(tmp_path / "run", whole)
    found = re.findall(r"going on from step (\d)", caplog.text)
    assert found == ["2", "3", "5"], "the attempt after step 0 begins anew"
    assert re.search(r"remainder and moments of (\d) of \1 blocks on drives", caplog.text)
    assert list((tmp_path / "drive0").iterdir()) == list((tmp_path / "drive1").iterdir()) == []


def test_the_plan_of_a_run_that_goes_on_from_its_drives_is_of_the_steps_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, **sections(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    totals = []
    for step in (0, 4):
        train_until(config, step)
        with pytest.raises(SystemExit):
            main(["train", str(file), "--plan-only"])
        totals += re.findall(r"^ total +([\d,]+) tokens: (\d+) steps", capsys.readouterr().out, re.MULTILINE)
    assert totals == [("768", "6"), ("256", "2")]


def test_a_checkpoint_that_is_newer_than_the_commit_wins(whole: Path, tmp_path: Path) -> None:
    changed = sections(tmp_path, commit_every=3)
    changed["checkpoint"] = {"every": 4}
    config = make_config(tmp_path, **changed)
    train_until(config, 5)
    record = read_record(tmp_path / "drive0")
    assert record is not None
    assert record.step == 3
    train(config)
    assert_same_runs(tmp_path / "run", whole)


def test_state_of_another_run_and_a_damaged_record_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, "one", **sections(tmp_path))
    train_until(config, 1)
    with pytest.raises(OutputError, match=r"holds the state of another run \(.*one, step 1\)"):
        train(make_config(tmp_path, "two", **sections(tmp_path)))
    record = tmp_path / "drive0" / "commit.json"
    record.write_bytes(record.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"commit\.json is damaged"):
        train(config)


def test_nodes_go_on_from_a_step_that_all_hold_or_from_a_newer_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path, **sections(tmp_path))
    owner = str(Path(config.out).absolute())

    def put(where: str, step: int, name: str = RECORD_NAME) -> None:
        (tmp_path / where).mkdir(parents=True, exist_ok=True)
        record = CommitRecord(
            owner=owner, fingerprint="", drives=(), step=step, copies="", sums=(), meta={"step": step}
        )
        write_record(tmp_path / where, record, name)

    def found(saved: int, *, nodes: int = 2, is_run: bool = True) -> int | None:
        held = [held_by(config, node, nodes) for node in range(nodes)]
        commit = find_commit(config, is_run=is_run, held=held, saved=saved)
        return None if commit is None else int(commit.meta["step"])

    assert found(-1) is None
    put("drive0/node-0", 5, PREPARED_NAME)
    assert found(-1) is None, "no node has committed it, and not all have prepared it"
    put("drive0/node-0", 4)
    put("drive0/node-1", 5)
    assert found(2) == 5
    assert found(5) is None
    assert found(2, is_run=False) is None
    with pytest.raises(CheckpointError, match=r"drive0/node-0 holds step 4 of this run, when several"):
        found(2, nodes=1)
    assert found(5, nodes=1) is None
    put("drive0", 6)
    with pytest.raises(CheckpointError, match=r"drive0 holds step 6 of this run, when one node was"):
        found(2)
    (tmp_path / "drive0" / RECORD_NAME).unlink()
    (tmp_path / "drive0/node-1" / RECORD_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"\(node 0 holds step 4 and step 5, node 1 holds none\)"):
        found(2)
    assert found(5) is None


def test_state_of_a_run_whose_directory_is_gone_is_not_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, **sections(tmp_path))
    train_until(config, 2)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        train(config)
    assert "holds step 2 of a run whose directory is gone" in caplog.text
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_settings_by_which_the_state_would_be_laid_out_otherwise_are_named(tmp_path: Path) -> None:
    train_until(make_config(tmp_path, **sections(tmp_path, fragments=False)), 2)
    said = r"memory.fragments is true, and the state in .* was written with false; use memory.fragments=false"
    with pytest.raises(CheckpointError, match=said):
        train(make_config(tmp_path, **sections(tmp_path, fragments=True)))
    whole, chunks = (Choice(fragments=False, expert_chunks=number) for number in (1, 4))
    state_commits.require_laid_out({"fragments": False, "expert_chunks": 4}, chunks, "drive")
    state_commits.require_laid_out({"fragments": False}, whole, "drive")  # a run of an older version
    for written, choice, words in ((4, whole, "is 1, .* with 4"), (1, chunks, "is 4, .* with 1")):
        committed = {"fragments": False, "expert_chunks": written}
        with pytest.raises(CheckpointError, match=f"memory.expert_chunks {words}; use"):
            state_commits.require_laid_out(committed, choice, "drive")


@pytest.mark.parametrize("fragments", [True, pytest.param(False, marks=pytest.mark.parity)])
def test_a_plan_of_other_fragments_does_not_keep_a_run_from_going_on(
    fragments: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that is measured again may be planned for in another way; the state is laid out as it is."""
    train_until(make_config(tmp_path, **sections(tmp_path, fragments=fragments)), 2)
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path, **sections(tmp_path, fragments="auto")))
    assert "going on from step 2" in caplog.text


@pytest.mark.parity
@pytest.mark.parametrize("num_kills", [2, 20])
def test_a_killed_run_goes_on_from_the_last_committed_step(tmp_path: Path, num_kills: int) -> None:
    steps = str(15 * num_kills)
    done = run_module("tests.train.killed_run", tmp_path, str(num_kills), "0", steps, "drives")
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")
    resumed = [
        int(step) for step in re.findall(r"going on from step (\d+)", (tmp_path / "log.txt").read_text())
    ]
    assert resumed == sorted(resumed)
    assert resumed, "no attempt went on from a commit"


KILLED_IN_A_SUM = """
import os, signal, sys
from pathlib import Path
from megatrain.store.drives.scratch import ScratchFiles
from megatrain.train import loop
from tests.searches import searched_for_a_moment
from tests.train.project import make_config
from tests.train.resume.test_state_commits import with_sums

steps, step_of, write = [], loop.train_step, ScratchFiles.write

def train_step(run):
    steps.append(run.step)
    return step_of(run)

def written(scratch, place, buffer):
    write(scratch, place, buffer)
    if len(steps) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

loop.train_step, ScratchFiles.write = train_step, written
with searched_for_a_moment():
    loop.train(make_config(Path(sys.argv[1]), "killed", **with_sums(Path(sys.argv[1]), on_drives=True)))
"""


def with_sums(root: Path, *, on_drives: bool) -> dict[str, Any]:
    """Return settings of a run with four rounds a step, whose state and sums are on drives, or in RAM."""
    found = sections(root, lockstep=1, **({"sums": "nvme"} if on_drives else {}))
    found["train"]["grad_accumulation"] = 4
    found["memory"]["tiers"]["ram"] = 600_000
    if not on_drives:
        del found["memory"]["tiers"]
    return found


def test_a_run_killed_while_a_sum_goes_to_a_drive_makes_the_step_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make_config(tmp_path, "whole", **with_sums(tmp_path, on_drives=False)))
    assert run_script(KILLED_IN_A_SUM, tmp_path).returncode == -signal.SIGKILL
    record = read_record(tmp_path / "drive0")
    assert record is not None
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path, "killed", **with_sums(tmp_path, on_drives=True)))
    assert f"going on from step {record.step}" in caplog.text
    assert record.step in (2, 3), "the third step may not have been committed yet"
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")
    assert list((tmp_path / "drive0").iterdir()) == list((tmp_path / "drive1").iterdir()) == []


def test_a_dry_run_leaves_the_run_s_state_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path, **sections(tmp_path))
    train_until(config, 1)
    before = {file: file.read_bytes() for file in tmp_path.glob("drive*/*")}
    shown: list[str] = []
    dry_run(config, shown.append)
    assert {file: file.read_bytes() for file in tmp_path.glob("drive*/*")} == before
    assert shown


def test_a_trace_of_a_run_on_drives_leaves_the_run_s_state_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path, **sections(tmp_path))
    train_until(config, 2)
    before = {file: file.read_bytes() for file in tmp_path.glob("drive*/*")}
    reports = trace(config, tmp_path / "trace.json")
    assert {file: file.read_bytes() for file in tmp_path.glob("drive*/*")} == before
    assert all(report.drive_read_bytes > 0 and report.drive_write_bytes > 0 for report in reports)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"nvme_read", "nvme_write"} <= names


@pytest.mark.sampled(2)
@every_value(activations=["recompute", "offload"], ram=[None, 540_000])
def test_a_run_with_boundaries_on_drives_takes_what_was_planned_and_gives_the_same_losses(
    ram: int | None, activations: str, tmp_path: Path
) -> None:
    """With all of the state in RAM, and with a part of it on the drives too."""
    ram = None if ram is None else ram + (3 << 20 if activations == "offload" else 0)
    losses = []
    for boundaries in ("device", "nvme"):
        memory: dict[str, Any] = {"activations": activations, "boundaries": boundaries}
        if boundaries == "nvme":
            memory["tiers"] = {"ram": ram, "nvme": [str(tmp_path / "drive0"), str(tmp_path / "drive1")]}
        config = make_config(
            tmp_path,
            boundaries,
            data={"seq_len": 64},
            train={"steps": 3, "precision": "bf16", "device": "emulated", "micro_batch_size": 4},
            memory={"fragments": False, **memory},
        )
        run = prepare(config)
        losses.append([train_step(run).loss for _ in range(3)])
        if boundaries == "nvme":
            assert run.planned is not None
            plan, offloaded = run.planned.plan, run.engine.arrangement.offloaded
            pools = {(pool.tier, pool.name): pool.nbytes for pool in plan.pools}
            check_allocated(run.engine, plan, "stop")
            assert offloaded.host_bytes == pools["ram", "staging of activations"] > 0
            assert run.engine.arrangement.scratch is not None
            assert run.engine.arrangement.scratch.nbytes == pools["nvme", "saved activations"] > 0
            assert offloaded.drive_bytes[1] > 0
        run.engine.close(removes=True)
    assert losses[0] == losses[1]
    assert list((tmp_path / "drive0").iterdir()) == list((tmp_path / "drive1").iterdir()) == []


@pytest.mark.sampled(2)
@every_value(device=["cpu", "emulated"], fragments=[False, "auto"])
def test_named_drives_that_ram_does_not_need_take_the_commits(
    device: str, fragments: bool | str, tmp_path: Path
) -> None:
    """Whatever else is left to the plan: no layer is resident, and the buffers before drives are counted."""
    losses = []
    for name, tiers in (("ram", {}), ("drives", {"tiers": {"nvme": [str(tmp_path / "drive")]}})):
        config = make_config(
            tmp_path,
            name,
            train={"steps": 3, "precision": "bf16", "device": device},
            memory={"fragments": fragments, **tiers},
        )
        run = prepare(config)
        losses.append([train_step(run).loss for _ in range(2)])
        assert run.planned is not None
        check_allocated(run.engine, run.planned.plan, "stop")
        if tiers:
            assert run.planned.plan.choice.resident_layers == run.engine.choice.resident_layers == 0
            assert run.planned.plan.tier_bytes("nvme") > 0
        run.engine.close(removes=True)
    assert losses[0] == losses[1]


def test_drives_are_left_alone_by_a_run_that_neither_needs_them_nor_commits(
    whole: Path, tmp_path: Path
) -> None:
    """Though they are named. What an earlier run of the same directory has committed is gone on from."""
    asked = sections(tmp_path, commit_every=None, resident_blocks=1)
    asked["memory"]["tiers"].pop("ram")
    config = make_config(tmp_path, **asked)
    run = prepare(config)
    assert run.planned is not None
    assert run.planned.plan.choice.tiers == frozenset()
    train_step(run)
    check_allocated(run.engine, run.planned.plan, "stop")
    run.engine.close(removes=True)
    assert not (tmp_path / "drive0").exists()

    train_until(make_config(tmp_path, **sections(tmp_path)), 3)
    asked["memory"].pop("resident_blocks")
    train(make_config(tmp_path, **asked))
    assert_same_runs(tmp_path / "run", whole)


def test_gradients_wait_on_drives_beside_state_in_ram(tmp_path: Path) -> None:
    """No state goes there, whatever share of RAM is free while the run begins."""
    asked = sections(tmp_path, commit_every=None, gradients="nvme", lockstep=2)
    asked["memory"]["tiers"].pop("ram")
    run = prepare(make_config(tmp_path, **asked))
    assert run.planned is not None
    train_step(run)
    check_allocated(run.engine, run.planned.plan, "stop")
    assert run.engine.host.has_drives
    placement = run.engine.host.on_drives.placement
    assert placement.state_on_drives == placement.working_on_drives == frozenset()
    drives = [pool.name for pool in run.planned.plan.pools if pool.tier == "nvme"]
    assert "waiting gradients" in drives
    run.engine.close(removes=True)


def test_a_run_that_does_not_fit_is_told_of_settings_not_of_other_machines(tmp_path: Path) -> None:
    config = make_config(tmp_path, train={"precision": "bf16", "device": "emulated"})
    model_config = AutoConfig.from_pretrained(config.model.path)
    ram = int((PROGRAM_BYTES + 560_000) / (USABLE_HOST - 0.05))
    spec = replace(emulated_spec(EmulatedMachine(), common_cpu("bf16")).with_ram(ram), drives=None)
    with pytest.raises(CapacityError, match=r"host memory") as caught:
        plan_training(config, PlannedModel(config.model.path, None, print, model_config), spec)
    assert "memory.tiers='{nvme: [DIRECTORY]}'" in str(caught.value)
    assert "--" not in str(caught.value)


def test_a_best_step_that_is_committed_and_not_yet_saved_is_saved_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would look for its checkpoint at the end, and never finish."""
    losses = iter([3.0, 2.0, 1.0, 5.0, 5.0, 5.0])
    monkeypatch.setattr(
        "megatrain.train.evaluate.evaluator.evaluate",
        lambda *_, **__: [Evaluation(name="val", loss=next(losses), count=1, seconds=0.0)],
    )
    more: dict[str, Any] = {"data": {"val_size": 0.05}, "eval": {"every": 1, "load_best": True}}
    config = make_config(tmp_path, **sections(tmp_path, commit_every=1), **more)
    begin = Saves.begin

    def killed(saves: Saves) -> None:
        if saves._run.step == 3:
            saves._run.engine.settle()
            raise KeyboardInterrupt
        begin(saves)

    with monkeypatch.context() as patch:
        patch.setattr(Saves, "begin", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    record = read_record(tmp_path / "drive0")
    assert record is not None
    assert record.step == 3
    train(config)
    best = tmp_path / "run/checkpoints/step-00000003/model.safetensors"
    assert (tmp_path / "run/hf/model.safetensors").read_bytes() == best.read_bytes()
