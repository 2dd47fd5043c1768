"""Trainers on several ranks train, log and save what one process does, bit for bit."""

from __future__ import annotations

import filecmp
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError, RankError
from tests.distributed.processes import exit_codes, run_ranks
from tests.forks import REPOSITORY, run_script
from tests.hf.scripts import train, train_all

parity = pytest.mark.parity

SAVES = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}


def same(told: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Assert that every rank tells the same, and that it is the first one alone who writes."""
    assert [one.pop("is_first") for one in told] == [True] + [False] * (len(told) - 1)
    for one in told:
        assert one == {name: value for name, value in expected.items() if name != "is_first"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mirror", [True, False])
def test_two_ranks_train_log_and_save_what_one_process_does(mirror: bool, tmp_path: Path) -> None:
    """11 micro-batches: the last step has 3, of which the second run has one; then the best model is read.

    The first rank is the last to come to a save, as on a slow disk.
    """
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    settings: dict[str, Any] = {"shards": 2, "save_strategy": "steps", "save_steps": 2, **evaluates}
    alone = train(None, out=str(tmp_path / "one"), accumulation=4, **settings)
    assert len({entry["loss"] for entry in alone["logged"] if "loss" in entry}) == 3
    assert len(set(alone["norms"])) == 3
    assert sum("eval_loss" in entry for entry in alone["logged"]) == 2
    # as many shards as ranks; the weights of one layer are on the devices, which rank 0 saves by itself
    fields = {"resident_layers": 1, "mirror_resident": mirror}
    settings |= {"shards": None, "saves_for_s": 0.2, "fields": fields}
    same(run_ranks(tmp_path / "logs", 2, train, out=str(tmp_path / "two"), accumulation=2, **settings), alone)
    files = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert files == {
        path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*") if path.is_file()
    }
    for name in files:
        # the arguments have the rank's own number of micro-batches in other words, and the state has times
        if name.name not in ("training_args.bin", "trainer_state.json"):
            assert filecmp.cmp(tmp_path / "one" / name, tmp_path / "two" / name, shallow=False), name


@parity
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_state_on_drives_trains_and_goes_on_to_the_same_bits(num_nodes: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    settings |= SAVES
    alone = train(None, out=str(tmp_path / "one"), accumulation=4, shards=2, **settings)
    settings |= {"accumulation": 2, "drives": str(tmp_path / "drive"), "out": str(tmp_path / "two")}
    same(run_ranks(tmp_path / "logs", 2, train, num_nodes=num_nodes, **settings), dict(alone))
    settings |= {"out": str(tmp_path / "two"), "resume": str(tmp_path / "two/checkpoint-2")}
    for one in run_ranks(tmp_path / "then", 2, train, num_nodes=num_nodes, **settings):
        assert one["weights"] == alone["weights"]
        assert one["logged"][:-1] == alone["logged"][:-1]


@parity
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"shards": 4, **SAVES}
    whole = train(None, out=str(tmp_path / "whole"), accumulation=4, **settings)
    run_ranks(
        tmp_path / "before",
        before,
        train,
        out=str(tmp_path / "run"),
        accumulation=4 // before,
        **settings,
    )
    told = run_ranks(
        tmp_path / "after",
        after,
        train,
        out=str(tmp_path / "run"),
        accumulation=4 // after,
        resume=str(tmp_path / "run/checkpoint-2"),
        **settings,
    )
    for one in told:
        assert one["weights"] == whole["weights"]
        assert one["logged"][:-1] == whole["logged"][:-1]  # the last one has averages of this call


KINDS: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft"},
    "sft in bf16": {"kind": "sft", "bf16": True},
    "sft packed": {"kind": "sft", "packing": True, "max_length": 24},
    "sft with an adapter": {"kind": "sft", "lora": True},
    "dpo": {"kind": "dpo", "precompute_ref_log_probs": True},
    "dpo with an adapter": {"kind": "dpo", "lora": True},
    "kto": {"kind": "kto", "precompute_ref_log_probs": True},
    "kto with an adapter": {"kind": "kto", "lora": True},
}


@parity
def test_trainers_of_trl_train_the_bits_of_one_process(tmp_path: Path) -> None:
    """All of them in one script, one after another."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")

    def runs(place: str, accumulation: int) -> dict[str, dict[str, Any]]:
        common: dict[str, Any] = {"bf16": False, "shards": 2, "eval_strategy": "steps", "eval_steps": 2}
        common["num_train_epochs"] = 2  # the first step has the rate 0: two of pairs have one loss
        own = {"accumulation": accumulation, **common}
        return {name: {"out": str(tmp_path / place / name), **own, **kind} for name, kind in KINDS.items()}

    alone, *_ = run_ranks(tmp_path / "one", 1, train_all, runs=runs("a", 4))
    told = run_ranks(tmp_path / "two", 2, train_all, runs=runs("b", 2))
    for name, expected in alone.items():
        assert len({entry["loss"] for entry in expected["logged"] if "loss" in entry}) > 1
        same([one[name] for one in told], expected)


@parity
@pytest.mark.parametrize(
    ("differs", "match"),
    [
        ({"rows": 1}, "rank 1 has read other batches than rank 0 at step 0"),
        ({"learning_rate": 2e-2}, "its learning_rate is '0.02', and not '0.01'"),
    ],
    ids=str,
)
def test_a_rank_with_other_data_or_arguments_is_refused(
    differs: dict[str, Any], match: str, tmp_path: Path
) -> None:
    codes = exit_codes(
        tmp_path / "logs", 2, train, out=str(tmp_path / "run"), accumulation=2, differs=differs
    )
    assert codes == [ConfigError.exit_code] * 2
    assert match in (tmp_path / "logs/errors").read_text()


@parity
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    codes = exit_codes(tmp_path / "logs", 2, train, out=str(tmp_path / "run"), accumulation=2, dies_at=1)
    assert codes == [RankError.exit_code, -9]
    assert "rank 1 (process" in (tmp_path / "logs/errors").read_text()


_SCRIPT = """
import json, sys
from tests.forks import REPOSITORY
from tests.hf.scripts import train

told = train(None, out=sys.argv[1], accumulation=2, num_train_epochs=2)
open(f"{sys.argv[1]}/{told.pop('is_first')}.json", "w").write(json.dumps(told))
"""


_FIRST = """
import os, socket, sys
taken = socket.create_server(("localhost", 0))
numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
numbers |= {"MASTER_ADDR": "localhost", "MASTER_PORT": taken.getsockname()[1]}
os.environ.update({name: str(number) for name, number in numbers.items()})
from megatrain.hf import StreamingTrainer
from transformers import TrainingArguments
print(os.environ["GLOO_SOCKET_IFNAME"], flush=True)
TrainingArguments(sys.argv[1], use_cpu=True)
"""


def test_a_script_that_cannot_meet_others_ends_in_a_sentence(tmp_path: Path) -> None:
    """It is accelerate that lets processes meet, when arguments of a trainer are made."""
    done = run_script(_FIRST, tmp_path)
    assert (done.returncode, done.stdout) == (ConfigError.exit_code, "lo\n")
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: rank 0 on {socket.gethostname()} does not meet the others at localhost:")
    assert "EADDRINUSE" in last
    assert last.endswith("free on the first one, and start them within their ddp_timeout")


@parity
def test_torchrun_starts_a_script_of_the_user_s(tmp_path: Path) -> None:
    """Here accelerate itself makes the processes' group, and Python ends them."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'train_runtime'") == 1
    alone = train(None, out=str(tmp_path / "one"), accumulation=4, shards=2, num_train_epochs=2)
    for is_first in (True, False):
        told = json.loads((tmp_path / f"{is_first}.json").read_text())
        assert told == {name: value for name, value in alone.items() if name != "is_first"}
