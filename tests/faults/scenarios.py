"""What the faults are injected into: command lines, and the files that they find."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.checkpoint import format, load
from megatrain.errors import CheckpointError
from tests.faults.shim import library
from tests.train.project import write_corpus, write_model_config

REPOSITORY = Path(__file__).parents[2]
NUMBERS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE)
PROBES = {
    "stat",
    "stat64",
    "lstat",
    "lstat64",
    "fstat",
    "fstat64",
    "fstatat64",
    "statx",
    "access",
    "faccessat",
}
PROBES |= {"readlink", "__xstat64", "__lxstat64", "__fxstat64"}
PROBE_NUMBERS = (errno.EIO, errno.EACCES)
"""What these can end with; they need no room and open nothing."""
STEPS = 2

_SETTINGS = [
    "model.init=random",
    "data.seq_len=8",
    "train.device=cpu",
    "train.micro_batch_size=1",
    "train.grad_accumulation=1",
    "optim.lr=0.01",
    "optim.warmup_steps=0",
    "memory.fragments=false",
    "memory.num_slots=2",  # little is left to plan: most of a case is what it does with files
    "memory.activations=recompute",
    "memory.boundaries=device",
    "checkpoint.every=1",
    "checkpoint.keep_last=1",
    "log.progress=none",
    "log.report=false",  # of a run that ends in whatever way; `test_record.py` lets it fail
]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Which call fails with what, and whether all later ones do."""

    at: int = -1
    number: int = 0
    always: bool = False
    only: str = ""
    """A pattern of the calls, written as `name path`, among which `at` is the index; empty: all are."""

    def __str__(self) -> str:
        return f"call {self.at} {errno.errorcode.get(self.number)} {'always' if self.always else 'once'}"


class Server:
    """The process of `tests.faults.server`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        environment = os.environ | {
            "LD_PRELOAD": str(library()),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(root / "cache"),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=REPOSITORY,
            env=environment | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, arguments: list[str], fault: Fault | None = None, *, warms: bool = False) -> dict[str, Any]:
        """Run a command line, with a fault or none."""
        fault = fault or Fault()
        request = {"arguments": arguments, "root": str(self._root), "at": fault.at, "warms": warms}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps(request | {"errno": fault.number, "always": fault.always, "only": fault.only}) + "\n"
        )
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@dataclass
class Bench:
    """A directory in which each case begins with the files of its scenario, and what to compare with."""

    root: Path
    server: Server
    starts: dict[str, Path] = field(default_factory=dict)
    """By scenario, a copy of the files that it begins with."""
    expected: dict[str, str] = field(default_factory=dict)
    """Digest of each file of the model that an uninterrupted run makes, and of its state."""
    resumed: dict[str, str] = field(default_factory=dict)
    """By what a fault has left, how a resume without a fault ended: "" is as it should."""

    def train(self, steps: int = STEPS, *more: str) -> list[str]:
        """Return the command line of a run."""
        paths = ["--model", str(self.root / "model"), "--data", str(self.root / "corpus.txt")]
        return ["train", *paths, "--out", str(self.root / "run"), "--steps", str(steps), *_SETTINGS, *more]

    def command(self, scenario: str) -> list[str]:
        """Return what a scenario runs."""
        if scenario == "export":
            return ["export", str(self.root / "run"), str(self.root / "exported")]
        if scenario == "drives":
            places = f"{self.root}/drive0, {self.root}/drive1"
            return self.train(STEPS, f"memory.tiers={{ram: 410000, nvme: [{places}]}}")
        return self.train()

    def begin(self, scenario: str) -> None:
        """Put the files of a scenario there, and nothing else."""
        for path in self.root.iterdir():
            if path.name not in ("starts", "cache"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.starts[scenario], self.root, dirs_exist_ok=True)

    def result(self) -> dict[str, str]:
        """Return digests of the final model and of the newest checkpoint's state, by name."""
        found = load.newest_whole(self.root / "run/checkpoints", warn=lambda _: None)
        assert found is not None
        files = [*(self.root / "run/hf").iterdir(), *(found[0] / "state").iterdir()]
        return {path.name: _digest(path) for path in files if path.name != "README.md"}  # it has times


@contextmanager
def bench(root: Path) -> Iterator[Bench]:
    """Start the server, and make the scenarios' files by runs without faults."""
    server = Server(root)
    made = Bench(root=root, server=server)
    try:
        _make_starts(made)
        yield made
    finally:
        server.close()


def cases(calls: Sequence[str]) -> list[tuple[Fault, str]]:
    """List the faults of the calls of a command, with the call that each is in.

    Of calls that do the same to the same file again and again: of the first two and of the last.
    """
    places: dict[str, list[int]] = {}
    for at, call in enumerate(calls):
        places.setdefault(call, []).append(at)
    kept = sorted({at for found in places.values() for at in (*found[:2], found[-1])})
    found = []
    for at in kept:
        call = calls[at]
        numbers = PROBE_NUMBERS if is_probe(call) else NUMBERS
        for number, always in itertools.product(numbers, (False, True)):
            found.append((Fault(at=at, number=number, always=always), call))
    return found


def is_probe(call: str) -> bool:
    """Say whether a call only asks what is there; libraries take its failure for "nothing"."""
    return call.partition(" ")[0] in PROBES


def _make_starts(made: Bench) -> None:
    root, ask = made.root, made.server.ask
    starts = root / "starts"
    starts.mkdir()

    def keep(scenario: str) -> None:
        shutil.copytree(root, starts / scenario, ignore=lambda *_: ["starts", "cache"])
        made.starts[scenario] = starts / scenario

    (root / "model").mkdir()
    write_model_config(
        root / "model", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    write_corpus(root / "corpus.txt", 200)
    keep("train")
    keep("drives")
    assert ask(made.train(), warms=True)["code"] == 0
    made.expected = made.result()
    keep("export")
    (root / "run/hf").rename(root / "elsewhere")
    shutil.rmtree(root / "elsewhere")
    keep("finish")
    made.begin("train")
    assert ask(made.train(1))["code"] == 0
    with open(root / "run/metrics.jsonl", "ab") as file:  # what a crash in step 2 leaves
        first = (root / "run/metrics.jsonl").read_bytes()
        file.write(b"damaged\n" + first.replace(b'"step": 1', b'"step": 2') + b'{"step": 3')
    keep("resume")
    for scenario in ("resume", "finish", "export", "drives"):  # what each imports is there for every fork
        made.begin(scenario)
        assert ask(made.command(scenario), warms=True)["code"] == 0


def state_key(root: Path) -> str:
    """Sum up what a resume goes on from; times and the like are left out."""
    parts = []
    found = [path for place in ("run", "drive0", "drive1") for path in (root / place).rglob("*")]
    for path in sorted(found):
        name = str(path.relative_to(root))
        if path.name == format.MANIFEST_NAME:
            try:
                load.verify(path.parent)
                value = "whole"
            except CheckpointError as error:
                value = str(error)
        elif path.name == "metrics.jsonl":
            value = str([line[:11] + line[-1:] for line in path.read_bytes().splitlines(keepends=True)])
        elif path.name == "events.jsonl":
            value = str(path.read_bytes()[-1:])
        elif path.is_file() and path.name not in ("env.json", "plan.json", "README.md"):
            value = _digest(path)
        else:
            value = ""
        parts.append(f"{name} {value}")
    return "\n".join(parts)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
