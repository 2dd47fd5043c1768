"""Runs of several ranks: they stop, are killed, and go on with another number of ranks, to the same bits."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from megatrain.cli.log import log_to_stderr
from megatrain.distributed.alone import ALONE
from megatrain.errors import CallbackError, OutputError, RankError
from megatrain.hardware.health import MachineHealth
from megatrain.plan.program.operations import Operation
from megatrain.stream.execute.executor import Executor
from megatrain.stream.report import StepReport
from megatrain.train.commands.trace import trace
from megatrain.train.ranks import count_written
from megatrain.train.records.json_lines import read_rows
from megatrain.train.records.measured import measured
from tests.distributed.crew import Crew
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.runs import train_at_defaults, train_on_a_full_disk, train_run
from tests.distributed.threads import Turns
from tests.distributed.training import digest_of
from tests.reference import assert_same_bits
from tests.train.evaluate.test_evaluation import losses_of
from tests.train.project import make_config, write_corpus, write_model_with_experts
from tests.train.test_loop import assert_same_runs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on one rank, without an interruption."""
    root = tmp_path_factory.mktemp("alone")
    run_ranks(root / "logs", 1, train_run, root=str(root), out="run")
    return root / "run"


@pytest.mark.parametrize(
    ("sizes", "killed", "memory"),
    [
        (((2, 2), (1, 1)), [1, 85], {}),
        pytest.param(((2, 1), (2, 2)), [0, 95], {}, marks=pytest.mark.parity),
        pytest.param(((2, 1), (1, 1)), [1, 140], {"resident_blocks": 2}, marks=pytest.mark.parity),
        (((2, 1), (2, 2)), [1, 140], {"resident_blocks": 2, "mirror_resident": False}),
        pytest.param(((4, 1), (2, 1)), [3, 85], {}, marks=pytest.mark.parity),
        pytest.param(((4, 1), (1, 1)), [1, 120], {}, marks=pytest.mark.parity),
        pytest.param(((4, 1), (4, 1)), [2, 130], {}, marks=pytest.mark.parity),
        pytest.param(((2, 1), (4, 1)), [0, 110], {}, marks=pytest.mark.parity),
        pytest.param(((4, 2), (2, 1)), [2, 95], {}, marks=pytest.mark.parity),
        pytest.param(((2, 1), (4, 4)), [1, 120], {}, marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_a_killed_rank_ends_all_and_other_ranks_go_on_to_the_same_bits(
    tmp_path: Path,
    alone: Path,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    killed: list[int],
    memory: dict[str, Any],
) -> None:
    """Sizes are of ranks and of nodes: those of the run that is killed, and those that go on."""
    run = kill_and_go_on(tmp_path, alone.parent, sizes, killed, memory=memory)
    assert any((run / "checkpoints").iterdir())
    assert_same_runs(run, alone)
    assert losses_of(run) == losses_of(alone)


def test_a_run_at_defaults_keeps_its_step_on_other_machines_and_ranks(
    tmp_path: Path, standing: Callable[[int], Crew]
) -> None:
    """The size of micro-batches was chosen for the first machine; the others would choose another."""
    root = str(tmp_path)
    chosen = train_at_defaults(None, root=root, out="whole", likes=64)
    tokens, size, number = chosen
    assert (tokens, size * number * 32) == (tokens, tokens)
    assert train_at_defaults(None, root=root, out="other", likes=1)[1] == 1 < size
    middle = str(tmp_path / "whole/checkpoints/step-00000002")
    elsewhere: dict[str, Any] = {"root": root, "likes": 1, "resume": middle}
    assert train_at_defaults(None, out="moved", **elsewhere) == chosen
    standing(2).run(train_at_defaults, out="two", **elsewhere)
    anew = standing(2).run(train_at_defaults, root=root, out="anew", likes=64)
    assert anew == [chosen, chosen], "two may begin a run as well as go on with one"
    whole = load_file(tmp_path / "whole/hf/model.safetensors")
    for name in ("moved", "two", "anew"):
        for key, tensor in load_file(tmp_path / name / "hf/model.safetensors").items():
            assert_same_bits(tensor, whole[key])


def test_loads_of_experts_are_those_of_all_ranks(tmp_path: Path, standing: Callable[[int], Crew]) -> None:
    write_model_with_experts(tmp_path / "model")
    write_corpus(tmp_path / "corpus.txt")
    train_run(ALONE, root=str(tmp_path), out="one")
    standing(2).run(train_run, root=str(tmp_path), out="two")
    one, two = (
        [row["experts"] for row in read_rows(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")
    )
    assert one == two
    assert len(one) == 6
    assert (tmp_path / "one/experts.json").read_bytes() == (tmp_path / "two/experts.json").read_bytes()


COLLECTIVES = 175
"""Of each rank, in the whole run."""


@pytest.mark.parity
@pytest.mark.parametrize("number", range(30))
def test_a_rank_killed_at_random_changes_no_bit(
    tmp_path: Path, alone: Path, standing: Callable[[int], Crew], number: int
) -> None:
    """From the first words of the ranks on; those that go on are there already."""
    draw = random.Random(number)
    size, then = draw.choice((2, 4)), draw.choice((1, 2, 4))
    killed = [draw.randrange(size), draw.randrange(1, COLLECTIVES)]
    place: dict[str, Any] = {"root": str(alone.parent), "out": tmp_path.name}
    crew = Crew(tmp_path / "first", size)
    crew.order(train_run, killed=killed, **place)
    codes = crew.codes()
    assert codes.pop(killed[0]) == -9
    assert set(codes) <= {RankError.exit_code, 6}
    standing(then).run(train_run, **place)
    run = alone.parent / tmp_path.name
    assert_same_runs(run, alone)
    assert losses_of(run) == losses_of(alone)


@pytest.mark.parity
def test_scales_over_nodes_are_saved_and_gone_on_from(tmp_path: Path) -> None:
    int8: dict[str, Any] = {"root": str(tmp_path), "optim": {"state": "int8"}}
    run_ranks(tmp_path / "alone", 1, train_run, out="run", **int8)
    place = {"out": "killed", **int8}
    codes = exit_codes(tmp_path / "first", 2, train_run, killed=[1, 130], num_nodes=2, **place)
    assert codes.pop(1) == -9
    assert set(codes) <= {RankError.exit_code, 6}
    assert any((tmp_path / "killed/checkpoints").iterdir())
    run_ranks(tmp_path / "then", 4, train_run, num_nodes=2, **place)
    assert_same_runs(tmp_path / "killed", tmp_path / "run")


def kill_and_go_on(
    place: Path,
    root: Path,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    killed: list[int],
    **sections: Any,
) -> Path:
    """Kill a rank of a run, which ends all, and go on with other ranks; return the run's directory."""
    (size, num_nodes), (then, nodes_then) = sizes
    run: dict[str, Any] = {"root": str(root), "out": place.name, **sections}
    codes = exit_codes(place / "first", size, train_run, killed=killed, num_nodes=num_nodes, **run)
    assert codes.pop(killed[0]) == -9
    assert set(codes) <= {RankError.exit_code, 6}  # 6: some of its blocks are updated, others are not
    run_ranks(place / "then", then, train_run, num_nodes=nodes_then, **run)
    return root / place.name


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 4])
def test_a_full_disk_at_a_save_ends_all_in_one_sentence_and_the_run_goes_on(
    tmp_path: Path, alone: Path, size: int
) -> None:
    place: dict[str, Any] = {"root": str(alone.parent), "out": tmp_path.name}
    codes = exit_codes(tmp_path / "first", size, train_on_a_full_disk, **place)
    assert codes == [OutputError.exit_code] + [RankError.exit_code] * (size - 1)
    said = (tmp_path / "first/errors").read_text()
    assert "Traceback" not in said
    assert said.count("\nrank 0: ") + said.startswith("rank 0: ") == 1
    assert "No space left on device" in said
    run = alone.parent / tmp_path.name
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    run_ranks(tmp_path / "then", 1, train_run, **place)
    assert_same_runs(run, alone)
    assert losses_of(run) == losses_of(alone)


@pytest.mark.parity
def test_a_directory_that_is_moved_under_ranks_has_the_state_of_all(tmp_path: Path, alone: Path) -> None:
    place: dict[str, Any] = {"root": str(alone.parent)}
    out, moved = tmp_path.name, f"{tmp_path.name}-moved"
    codes = exit_codes(tmp_path / "first", 2, _train_and_move, out=out, moved=moved, **place)
    assert codes == [OutputError.exit_code, RankError.exit_code]
    said = (tmp_path / "first/errors").read_text()
    assert "Traceback" not in said
    assert said.count("was moved to") == 1
    assert not (alone.parent / out).exists()
    run_ranks(tmp_path / "then", 1, train_run, out=moved, **place)
    assert_same_runs(alone.parent / moved, alone)


def _train_and_move(ranks: Any, *, root: str, out: str, moved: str) -> str:
    class Mover(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 3 and ranks.rank == 0:
                (Path(root) / out).rename(Path(root) / moved)

    return train_run(ranks, root=root, out=out, callbacks=[Mover()])


@pytest.mark.parametrize(("size", "num_nodes"), [(2, 1), (2, 2)])
def test_callbacks_of_all_ranks_read_the_state_and_the_first_one_decides(
    tmp_path: Path, alone: Path, size: int, num_nodes: int
) -> None:
    """Between steps and within one, of what other ranks and nodes have too."""
    place: dict[str, Any] = {"root": str(alone.parent)}
    (expected,) = run_ranks(tmp_path / "one", 1, _train_and_read, out=f"{tmp_path.name}-one", **place)
    name = f"{tmp_path.name}-all"
    found = run_ranks(tmp_path / "all", size, _train_and_read, num_nodes=num_nodes, out=name, **place)
    assert found == [expected] * size
    assert len(expected) == 2 * 6
    assert len(set(expected)) == 2 * 6
    run = alone.parent / name
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == [
        f"step-0000000{step}" for step in (2, 3, 4, 6)
    ]
    assert_same_runs(run, alone)


def test_a_callback_that_fails_on_another_rank_ends_all_and_the_run_goes_on(
    tmp_path: Path, alone: Path
) -> None:
    place: dict[str, Any] = {"root": str(alone.parent), "out": tmp_path.name}
    codes = exit_codes(tmp_path / "first", 2, _fail_on_the_second, **place)
    assert codes == [CallbackError.exit_code, RankError.exit_code], "the first one is not ended by another"
    said = (tmp_path / "first/errors").read_text()
    text = "the callback Failing failed in on_step_end (ZeroDivisionError: at step 3); step 3 is saved in"
    assert said.startswith(f"rank 0: {text}"), said
    assert "Traceback" not in said
    run_ranks(tmp_path / "then", 1, train_run, **place)
    assert_same_runs(alone.parent / tmp_path.name, alone)


def test_a_state_that_cannot_be_committed_ends_all_ranks_and_is_saved(tmp_path: Path) -> None:
    """Between two steps in which nothing is saved: the others have to hear of it."""
    codes = exit_codes(tmp_path / "logs", 2, _commit_what_is_no_json, root=str(tmp_path))
    assert codes == [CallbackError.exit_code, RankError.exit_code]
    said = (tmp_path / "logs/errors").read_text()
    assert "the callback Unsavable failed in state (" in said
    assert "step 3 is saved in" in said
    assert "Traceback" not in said


class Unsavable(TrainerCallback):
    """Has a state that is no JSON from step 3 on."""

    step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"value": math.nan if self.step == 3 else 1.0}}


def _commit_what_is_no_json(ranks: Any, *, root: str) -> str:
    tiers = {"ram": 10**9, "nvme": [f"{root}/drive"]}
    return train_run(
        ranks,
        root=root,
        out="run",
        callbacks=[Unsavable()] if ranks.rank == 0 else [],
        memory={"tiers": tiers, "commit_every": 1, "activations": "recompute"},
        checkpoint={"every": 6},
        eval={},
        data={"val_size": 0},
    )


class Reading(TrainerCallback):
    """Reads gradients in each step and masters behind it; each rank has wishes of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.read: list[str] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.read.append(digest_of(dict(model._megatrain_engine.named_gradients())))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        assert state.is_world_process_zero is (self.rank == 0)
        self.read.append(digest_of(dict(model._megatrain_engine.named_masters())))
        control.should_save = np.bool_(self.rank == 0 and state.global_step == 3)
        control.should_training_stop = self.rank == 1 and state.global_step == 2


class Failing(TrainerCallback):
    """Fails at step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise ZeroDivisionError("at step 3")


def _train_and_read(ranks: Any, *, root: str, out: str) -> list[str]:
    reading = Reading(0 if ranks is None else ranks.rank)
    checkpoint = {"every": 2, "keep_last": None}
    train_run(ranks, root=root, out=out, callbacks=[reading], checkpoint=checkpoint)
    return reading.read


def _fail_on_the_second(ranks: Any, *, root: str, out: str) -> str:
    return train_run(ranks, root=root, out=out, callbacks=[Failing()] if ranks.rank == 1 else [])


def test_ranks_that_would_train_other_things_are_refused(tmp_path: Path) -> None:
    codes = exit_codes(tmp_path / "logs", 2, _train_another, root=str(tmp_path))
    assert codes == [2, 2]
    said = (tmp_path / "logs/errors").read_text()
    assert "rank 1 would train something else than rank 0: its optim.lr is 0.02, and not 0.01" in said


def test_what_all_ranks_would_refuse_is_said_once(tmp_path: Path) -> None:
    optim = {"warmup_steps": 99}
    assert exit_codes(tmp_path / "logs", 2, train_run, root=str(tmp_path), out="run", optim=optim) == [2, 7]
    said = (tmp_path / "logs/errors").read_text()
    assert said.count("optim.warmup_steps is 99, but the run has 6 steps") == 1, said


def _train_another(ranks: object, *, root: str) -> str:
    lr = 0.01 if ranks.rank == 0 else 0.02  # type: ignore[attr-defined]
    return train_run(ranks, root=root, out="run", optim={"lr": lr})


def test_a_run_says_how_many_ranks_it_has_and_records_what_they_did(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": "leap " * number}) + "\n" for number in range(1, 41))
    (tmp_path / "rows.jsonl").write_text(rows)
    codes = exit_codes(tmp_path / "logs", 2, _train_short, root=str(tmp_path))
    assert codes == [0, 0]
    said = (tmp_path / "logs/errors").read_text()
    assert said.count("ranks: 2, with ") == 1
    assert "each and one state in a node's memory; parallel.shards is 4: give it too, if" in said
    first, *_, last = read_rows(tmp_path / "run/events.jsonl")
    assert (first["ranks"], first["nodes"], first["shards"]) == (2, 1, 4)
    assert len(last["waited_s"]) == 2
    assert min(last["waited_s"]) > 0
    (row,) = read_rows(tmp_path / "run/metrics.jsonl")
    told = json.loads((tmp_path / "told.json").read_text())
    assert row["exchanged_bytes"] == told["exchanged"] > 0
    assert row["gathered_bytes"] == told["gathered"] > 0
    assert_rows_of_both(tmp_path / "trace.json", row)
    assert (row["spread_bytes"], row["swapped_bytes"]) == (0, 0)
    assert row["tokens"] < 4 * 2 * 32, "rows are filled up"
    assert row["tokens_per_s"] * row["seconds"] == pytest.approx(row["tokens"])
    of_a_token = told["own_flops"] / (2 * 2 * 32)  # the engine counts its part, padding too
    assert told["model_flops"] / of_a_token == pytest.approx(row["tokens"])
    assert row["mfu"] == pytest.approx(told["model_flops"] / told["seconds"] / (2 * told["peak"]))


def _train_short(ranks: Any, *, root: str) -> str:
    told: dict[str, float] = {}
    if ranks.rank == 0:
        log_to_stderr()

    def noted(report: StepReport, **values: Any) -> dict[str, Any]:
        told.update(own_flops=report.model_flops, seconds=report.seconds, peak=report.matmul_peak or 0.0)
        told.update(values)
        return measured(report, **values)

    def moved(executor: Executor, operation: Operation) -> None:
        kind = {"exchange": "exchanged", "gather": "gathered"}.get(operation.label)
        if kind is not None:
            told[kind] = told.get(kind, 0) + operation.nbytes
        issue(executor, operation)

    issue = Executor.issue
    sections: dict[str, Any] = {
        "data": {"packing": "pad", "seq_len": 32, "path": f"{root}/rows.jsonl"},
        "train": {"steps": 1, "grad_accumulation": 4, "precision": "bf16"},
        "optim": {"warmup_steps": 0},
        "eval": {},
    }
    with patch("megatrain.train.step.measured", noted), patch.object(Executor, "issue", moved):
        place = train_run(ranks, root=root, out="run", **sections)
    with patch("megatrain.train.run.plan_memory", return_value=None):
        config = make_config(Path(root), "trace", **sections, parallel={"shards": 4, "gather": "on"})
        trace(config, Path(root, "trace.json"), steps=1, ranks=ranks)
    if ranks.rank == 0:
        Path(root, "told.json").write_text(json.dumps(told))
    return place


def assert_rows_of_both(file: Path, row: Mapping[str, Any]) -> None:
    """Each rank is a process of the trace, and exchanges while the other one does."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    spans: dict[int, list[Any]] = {1: [], 2: []}
    for event in events:
        if event["name"].startswith("exchange"):
            spans[event["pid"]].append(event)
    assert len(spans[1]) == len(spans[2]) > 0
    assert sum(event.get("args", {}).get("bytes", 0) for event in spans[1]) == row["exchanged_bytes"]
    for one, other in zip(spans[1], spans[2], strict=True):
        assert one["name"] == other["name"]
        assert max(one["ts"], other["ts"]) < min(one["ts"] + one["dur"], other["ts"] + other["dur"])


def test_what_all_ranks_have_written_to_drives_is_counted(tmp_path: Path) -> None:
    def written(ranks: Any) -> int | None:
        root = tmp_path / str(ranks.rank)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/io").write_text("write_bytes: 100\n")
        health = MachineHealth(root=root)
        health.resume(5000)
        (root / "proc/self/io").write_text(f"write_bytes: {400 + 1000 * ranks.rank}\n")
        for _ in range(2):
            count_written(health, ranks)
        return health.written_bytes()

    assert Turns(2).run(written) == [5000 + 300 + 1300] * 2
