"""Strikes runs at random moments: `python -m tests.train.struck_run ROOT NUMBER SEED STEPS
WHERE HOW [START]`.

Each strike has a run of its own, which is struck once, at a moment that is chosen uniformly over the life of
a process. It goes on in another process, and is then compared with the run that nothing has struck. Its
checkpoints are written in the background, to a disk so slow that one is on its way most of the time.

WHERE is `ram`; `drives`, with the state of the struck runs on two drives; or `ranks`, two of them. HOW is
`kill`, with SIGKILL, of either rank or of both, or `signals`: one of those that ask a run to stop, which each
rank gets, as from a launcher. With `fresh` as START each process is a new interpreter; else it is a fork of
one in which everything is imported, counted and compiled. The last line that is printed is a JSON object of
what the strikes have met.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megatrain import files
from megatrain.checkpoint import chunk_files, format
from megatrain.checkpoint.load import verify
from megatrain.config import Config
from megatrain.errors import RankError, TornStateError, as_ours
from megatrain.train import loop
from megatrain.train.commands.dry_run import dry_run
from megatrain.train.loop import train
from tests.distributed.processes import joined
from tests.searches import searched_for_a_moment
from tests.train.project import make_config, write_corpus, write_model_config
from tests.train.test_loop import rows_of

SAVED_EVERY = 2
CHUNK_BYTES = 4096
WRITE_S = 0.002
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOPPED = 75
ENDED_BY_OTHERS = {RankError.exit_code, TornStateError.exit_code}
"""The ends of a rank when another one is gone; the second: some of its blocks are updated, others are not."""
_OWN = ("config", "drive_written_bytes", "last_good")
"""What a manifest has of the processes that a run has had, and of which checkpoints they have made."""


class Slow(files.FileCalls):
    """A disk on which each write of a large file takes some time."""

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        time.sleep(WRITE_S)
        return super().write_at(descriptor, data, offset)


def settings_of(root: Path, out: str, where: str, steps: int) -> Config:
    """Return the settings of a run; those of one that is struck differ in where its state is."""
    sections: dict[str, dict[str, Any]] = {
        "train": {"steps": steps, "precision": "bf16", "micro_batch_size": 1},
        "data": {"val_size": 0.05},
        "eval": {"every": 5, "batches": 2},
        "checkpoint": {"every": SAVED_EVERY, "background": True},
        "log": {"report": False},
    }
    if where == "drives":
        sections["train"]["device"] = "emulated"
        sections["memory"] = {"activations": "recompute", "lockstep": 2, "fragments": False}
        if out != "whole":
            drives = [str(root / out / f"drive{number}") for number in range(2)]
            sections["memory"]["tiers"] = {"ram": 540_000, "nvme": drives}
    if where == "ranks":
        sections["parallel"] = {"shards": 2, "gather": "on"}
    return make_config(root, f"{out}/run", **sections)


@contextmanager
def _marked(place: Path) -> Iterator[None]:
    """Leave `heard` in a directory once signals are the run's, and `over` before they are not any more."""
    flag = loop.stop_flag

    @contextmanager
    def told(*arguments: Any, **options: Any) -> Iterator[Any]:
        with flag(*arguments, **options) as stop:
            (place / "heard").touch()
            try:
                yield stop
            finally:
                (place / "over").touch()

    with patch.object(loop, "stop_flag", told):
        yield


def be(root: Path, out: str, where: str, steps: int, rank: int, start: int) -> int:
    """Be a process of a run, of its start of this number; return its exit code."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, handler)  # as in a terminal, however the tests were started
    torch.set_num_threads(1)
    format.CHUNK_BYTES = CHUNK_BYTES
    chunk_files.DIRECT_BYTES = 2 * CHUNK_BYTES
    files.system = Slow()
    config, store = settings_of(root, out, where, steps), root / out / f"store{start}"
    is_done = False
    try:
        with (
            _marked(root / out) if rank == 0 else nullcontext(),
            joined(rank, 2 if where == "ranks" else 1, str(store), timeout_s=60) as ranks,
        ):
            (root / out / f"met{rank}").touch()
            train(config, ranks=ranks)
            is_done = True
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        if is_done:  # and waits for the other rank, which is not: that is no part of a run
            return 0
        traceback.print_exc()
        ours = as_ours(error)
        return 1 if ours is None else ours.exit_code


class Strikes:
    """Runs in a directory, and what they have met."""

    def __init__(self, root: Path, seed: int, where: str, steps: int, *, is_fresh: bool) -> None:
        self._root, self._where, self._steps, self._is_fresh = root, where, steps, is_fresh
        self._chance = random.Random(seed)
        self._starts = 0
        self.met: Counter[str] = Counter()

    def start(self, out: str) -> list[int]:
        """Start the processes of a run, and return their numbers."""
        self._starts += 1
        (self._root / out).mkdir(exist_ok=True)
        for mark in ("heard", "over", "met0", "met1"):
            (self._root / out / mark).unlink(missing_ok=True)
        return [self._fork(out, rank) for rank in range(2 if self._where == "ranks" else 1)]

    def _fork(self, out: str, rank: int) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            said = self._root / out / f"said{rank}.txt"
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
            own = [str(self._root), out, self._where, *map(str, (self._steps, rank, self._starts))]
            if self._is_fresh:
                os.execv(sys.executable, [sys.executable, "-m", "tests.train.struck_run", "be", *own])
            code = be(self._root, out, self._where, self._steps, rank, self._starts)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def whole(self) -> None:
        """Train the run that nothing strikes, twice, and learn how long one lives."""
        lives = []
        for out in ("whole", "again"):
            began = time.monotonic()
            codes = ends(self.start(out))
            assert not any(codes), (codes, self.said(out))
            lives.append(time.monotonic() - began)
            if out == "whole":
                self.expected = left_by(self._root / "whole/run")
        self.life_s = min(lives)
        self.compare("again")

    def strike(self, number: int, *, kills: bool) -> None:
        """Strike a run, go on with it, and compare."""
        while True:
            out = f"struck{number}"
            shutil.rmtree(self._root / out, ignore_errors=True)
            children = self.start(out)
            time.sleep(self._chance.uniform(0, self.life_s))
            struck, kind = children, signal.SIGKILL
            if not kills:
                kind = self._chance.choice(SIGNALS)
            elif len(children) > 1:
                struck = self._chance.choice([children, children[:1], children[1:]])
            for child in struck:
                os.kill(child, kind)
            have_met = all((self._root / out / f"met{rank}").exists() for rank in range(len(children)))
            if len(children) > 1 and not have_met:  # they do not watch each other yet: a launcher ends them
                for child in children:
                    os.kill(child, signal.SIGKILL)
                self.met["before the ranks meet"] += 1
            codes = ends(children)
            if any(codes):
                break
            self.met["finished before"] += 1
        if len(children) > 1 and not have_met:
            assert not (self._root / out / "run/metrics.jsonl").exists()
        elif kills:
            self._check_kill(out, codes, [child in struck for child in children])
        else:
            self._check_stop(out, kind, codes)
        codes_after = ends(self.start(out))
        assert not any(codes_after), (codes_after, self.said(out))
        self.compare(out)
        self.met["strikes"] += 1
        shutil.rmtree(self._root / out)

    def _check_kill(self, out: str, codes: list[int], are_struck: list[bool]) -> None:
        """Assert that ranks that were not killed have ended by themselves, and note what the kill has met."""
        run, done = self._root / out / "run", self._ends_of_done(out)
        for code, is_struck in zip(codes, are_struck, strict=True):
            allowed = {-signal.SIGKILL} if is_struck else ENDED_BY_OTHERS | done
            assert code in allowed, (codes, are_struck, self.said(out))
        hidden = [path.name for path in (run / "checkpoints").glob(".*")]
        self.met["in a save"] += any(name.startswith(".tmp-") for name in hidden)
        self.met["in a removal"] += any(name.startswith(".trash-") for name in hidden)
        self.met["before the first step"] += not (run / "metrics.jsonl").exists()
        self.met["in the export"] += (run / ".hf-partial").exists()

    def _ends_of_done(self, out: str) -> set[int]:
        """Return the end of a rank that has nothing left to do: the first one exports by itself."""
        last = self._root / out / f"run/checkpoints/step-{self._steps:08d}"
        return {0} if last.exists() else set()

    def _check_stop(self, out: str, kind: signal.Signals, codes: list[int]) -> None:
        """Assert that a run that was asked to stop has saved its last step, and has nothing half-written."""
        place = self._root / out
        run, first = place / "run", codes[0]
        if first != STOPPED:
            at_once = {130 if kind == signal.SIGINT else -kind}
            if len(codes) > 1:
                at_once |= ENDED_BY_OTHERS | self._ends_of_done(out)
            assert set(codes) <= at_once, (kind, codes, self.said(out))
            assert not (place / "heard").exists() or (place / "over").exists(), (kind, self.said(out))
            self.met["before its steps, or after"] += 1
            return
        assert set(codes[1:]) <= {0}, (kind, codes, self.said(out))
        assert [path.name for path in (run / "checkpoints").glob(".*")] == []
        rows = rows_of(run) if (run / "metrics.jsonl").exists() else []
        taken = rows[-1]["step"] if rows else 0  # it may be stopped before its first step
        newest = verify(max((run / "checkpoints").glob("step-*")))
        assert newest.step == taken, (newest.step, taken)
        assert not (run / "hf").exists()
        self.met[f"stopped by {kind.name}"] += 1

    def compare(self, out: str) -> None:
        """Assert that a run has left what the whole one has."""
        found = left_by(self._root / out / "run")
        assert found.keys() == self.expected.keys(), found.keys() ^ self.expected.keys()
        for name, value in self.expected.items():
            assert found[name] == value, (out, name, self.said(out))

    def said(self, out: str) -> str:
        """Return what the processes of a run have said, for a message."""
        return "\n".join(file.read_text()[-3000:] for file in (self._root / out).glob("said*.txt"))


def ends(children: list[int]) -> list[int]:
    """Wait for processes, and return their exit codes; that of one that was killed is negative."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def left_by(run: Path) -> dict[str, Any]:
    """Return what a run has left: rows, record and files of its last checkpoint, and files of its model."""
    newest = max((run / "checkpoints").glob("step-*"))
    meta = {name: value for name, value in verify(newest).meta.items() if name not in _OWN}
    meta["rng"] = meta["rng"]["torch"]  # a process seeds Python's anew
    kept = {
        f"{root.name}/{file.relative_to(root)}": file.read_bytes()
        for root in (newest, run / "hf")
        for file in root.rglob("*")
        if file.is_file() and file.name not in (format.MANIFEST_NAME, "README.md")
    }
    rows = [[row[name] for name in ("step", "loss", "grad_norm", "lr", "tokens")] for row in rows_of(run)]
    return {"rows": rows, **{f"record: {name}": value for name, value in meta.items()}, **kept}


def main(root: Path, number: int, seed: int, steps: int, where: str, how: str, start: str = "fork") -> None:
    """Strike `number` runs."""
    (root / "whole").mkdir()
    write_corpus(root / "corpus.txt", 3000)
    write_model_config(root / "model", num_hidden_layers=2)
    dry_run(settings_of(root, "whole", where, steps), lambda _: None)
    strikes = Strikes(root, seed, where, steps, is_fresh=start == "fresh")
    strikes.whole()
    for each in range(number):
        strikes.strike(each, kills=how == "kill")
    print(json.dumps({"life_s": round(strikes.life_s, 2), **strikes.met}))


if __name__ == "__main__":
    with searched_for_a_moment():
        if sys.argv[1] == "be":
            _, _, place, name, tier, *numbers = sys.argv
            total, own_rank, own_start = map(int, numbers)
            sys.exit(be(Path(place), name, tier, total, own_rank, own_start))
        strikes_to_do, its_seed, total = map(int, sys.argv[2:5])
        main(Path(sys.argv[1]), strikes_to_do, its_seed, total, *sys.argv[5:])
