"""Kills runs at calls into the file system: `python -m tests.train.killed_calls ROOT NUMBER SEED KIND`.

The run is evaluated, keeps its best checkpoint, stops early, skips jumps of its loss, and has a callback that
wishes and counts; KIND is `model` or `adapters`. It ends as the one that was never killed: rows, events,
checkpoints, what they know, and every bit. Each attempt is a fork, as in `killed_run`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaForCausalLM, TrainerCallback
from transformers.trainer_callback import ExportableState

from megatrain import files
from megatrain.checkpoint.load import verify
from megatrain.config import Config
from megatrain.data.tokenizer import train_tokenizer
from megatrain.train.caller import Caller
from megatrain.train.commands.dry_run import dry_run
from megatrain.train.loop import train
from megatrain.train.spikes import Spikes
from tests.searches import searched_for_a_moment
from tests.train.killed_run import wait
from tests.train.project import make_config, write_corpus, write_model_config
from tests.train.test_loop import assert_same_runs, rows_of

_TOLD = ("evaluation", "best", "skipped", "spike", "stop", "end")
_OWN = ("config", "drive_written_bytes")
"""What a manifest has of the attempt that wrote it."""


class Counting(TrainerCallback, ExportableState):
    """Counts steps, and has wishes."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {}}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.count += 1
        control.should_save |= state.global_step == 3
        control.should_evaluate |= state.global_step == 5
        return control


def jump_at_step_5() -> None:
    """Let the fifth loss be a jump, whatever it is: which one it is, a checkpoint knows."""
    take = Spikes.take

    def told(self: Spikes, loss: float) -> float | None:
        take(self, loss)
        return 0.0 if len(self.state()) == 5 else None

    Spikes.take = told  # type: ignore[method-assign]


def dies_at(number: int, calls: list[str]) -> None:
    """Let the process die at the call of this number; -1: only list them."""
    for name, method in list(vars(files.FileCalls).items()):
        if name.startswith("_"):
            continue

        def call(*args: Any, name: str = name, method: Callable[..., Any] = method) -> Any:
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(name)
            return method(*args)

        setattr(files.FileCalls, name, wraps(method)(call))


def settings_of(root: Path, out: str, kind: str) -> Config:
    """Return the settings of the run."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(root / "base"), "init": "pretrained"},
        "data": {"val_size": 0.1},
        "train": {"steps": 9, "on_spike": "skip", "micro_batch_size": 1},
        "optim": {"lr": 0.3, "warmup_steps": 0},
        "eval": {"every": 2, "patience": 3, "min_delta": 3.0, "load_best": True, "batches": 2},
        "checkpoint": {"every": 3, "keep_last": 1},
        "log": {"report": False, "progress": "none"},
    }
    if kind == "adapters":
        sections["lora"] = {"r": 4, "dropout": 0.1}
    return make_config(root, out, **sections)


def attempt(root: Path, out: str, kind: str, number: int) -> int:
    """Run it in a fork that dies at a call; returns its exit status."""
    child = os.fork()
    if child:
        return wait(child)
    code = 1
    try:
        calls: list[str] = []
        dies_at(number, calls)
        caller = Caller(counts=root, prepared=root / "prepared")
        train(settings_of(root, out, kind), callbacks=[Counting()], caller=caller)
        (root / "calls.json").write_text(json.dumps(calls))
        code = 0
    finally:
        os._exit(code)


def left_by(run: Path) -> dict[str, Any]:
    """Return what a run has left and told; of an event that was told again, the last time."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = {(row["event"], row["step"]): {**row, "time": 0} for row in events if row["event"] in _TOLD}
    metas = {path.name: dict(verify(path).meta) for path in (run / "checkpoints").iterdir()}
    for meta in metas.values():
        meta["rng"] = meta["rng"]["torch"]  # a fork seeds Python's anew
        for name in _OWN:
            meta.pop(name, None)
    rows = [(row["targets"], row["skipped"], row.get("spike_above")) for row in rows_of(run)]
    return {"files": sorted(os.listdir(run)), "told": told, "metas": metas, "rows": rows}


def main(root: Path, number: int, seed: int, kind: str) -> None:
    """Kill `number` runs, some of them more than once."""
    torch.set_num_threads(1)
    jump_at_step_5()
    write_model_config(root / "model", num_hidden_layers=1)
    corpus = write_corpus(root / "corpus.txt", 2000)
    LlamaForCausalLM(AutoConfig.from_pretrained(root / "model")).save_pretrained(root / "base")
    train_tokenizer(iter(corpus.read_text().splitlines()), 300).save_pretrained(root / "base")
    dry_run(settings_of(root, "whole", kind), lambda _: None)
    assert attempt(root, "whole", kind, -1) == 0
    calls = json.loads((root / "calls.json").read_text())
    expected = left_by(root / "whole")
    assert {"skipped", "best", "stop"} <= {event for event, _ in expected["told"]}, expected["told"].keys()
    chance = random.Random(seed)
    for place in chance.sample(range(len(calls)), number):
        points = [place, *(chance.randrange(len(calls)) for _ in range(chance.choice((0, 0, 1, 2))))]
        shutil.rmtree(root / "killed", ignore_errors=True)
        status = -signal.SIGKILL
        for point in (*points, -1):
            if status == -signal.SIGKILL:
                status = attempt(root, "killed", kind, point)
        assert status == 0, (points, status)
        found = left_by(root / "killed")
        for name, value in expected.items():
            assert found[name] == value, (points, name, found[name], value)
        assert_same_runs(root / "killed", root / "whole")
    print(f"{number} of {len(calls)} calls")


if __name__ == "__main__":
    with searched_for_a_moment():
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
