"""How long ranks of two machines take to end when the network between them dies in silence.

    python -m benchmarks.distributed.lost_network [--cuts 20] [--timeout 10] [--out FILE]

The machines are namespaces of this one (`tests/distributed/machines.py`), whose names stand for themselves
alone, and nothing is set. First a run is trained to its end there, and on one machine, and the bits are
compared. Then the link is cut while they train, by turns at either end: started by torchrun, whose process
has the store, and as a scheduler starts ranks by themselves, so that the first one has it; with one rank on
each and with two. From then on the time is taken until everything of a machine has ended. It has to be within
`parallel.timeout` and 10 seconds, with exit code 7 of every rank, and one sentence on each machine. It runs
as root.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import emit, hardware
from megatrain.errors import RankError
from tests.distributed.machines import Machines
from tests.train.project import make_config

GRACE_S = 10.0
LIMIT_S = 300.0
"""How long anything may take before this gives up on it."""
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Compare the bits, cut the link so many times, and say what was not as promised."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=10.0, help="parallel.timeout")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        digests = trained(Path(place))
    are_equal = len(set(digests.values())) == 1
    print(f"bits: {digests}: {'equal' if are_equal else 'NOT EQUAL'}", flush=True)
    chance = random.Random(0)
    kinds = itertools.cycle(itertools.product((True, False), (1, 2), (0, 1)))
    rows = []
    for number, (by_torchrun, num_local, end) in zip(range(arguments.cuts), kinds, strict=False):
        with tempfile.TemporaryDirectory() as place:
            later_s = chance.uniform(0, 2)
            row = cut(Path(place), end, num_local, arguments.timeout, later_s, by_torchrun=by_torchrun)
        rows.append(row)
        verdict = "ok" if row["is_as_promised"] else f"NOT AS PROMISED: {row}"
        started = "torchrun" if by_torchrun else "by themselves"
        print(
            f"cut {number + 1} at node {end}, {num_local} ranks each, {started}: ended after "
            f"{row['ended_after_s']} s with {row['codes']}: {verdict}",
            flush=True,
        )
    result = {
        "hardware": hardware(),
        "timeout_s": arguments.timeout,
        "are_bits_equal": are_equal,
        "num_as_promised": sum(row["is_as_promised"] for row in rows),
        "longest_s": max(max(row["ended_after_s"]) for row in rows),
        "cuts": rows,
    }
    emit(result, arguments.out)


def trained(place: Path) -> dict[str, str]:
    """Train to the end on one machine, and on two, by one and by two ranks; return digests of the models."""
    found = {}
    alone = described(place, "alone", 60)
    subprocess.run([*_train(alone)], env=_environment(), check=True, capture_output=True)
    found["one machine"] = _digest(place / "alone/hf/model.safetensors")
    for num_local in (1, 2):
        name = f"two machines with {num_local}"
        (place / f"of{num_local}").mkdir()
        with Machines(place / f"of{num_local}") as machines:
            config = described(place, f"run{num_local}", 60)
            with started(machines, config, num_local, place, by_torchrun=True) as processes:
                for process in processes:
                    assert process.wait(LIMIT_S) == 0, (place / "said0").read_text()
        found[name] = _digest(place / f"run{num_local}/hf/model.safetensors")
    return found


def cut(
    place: Path, end: int, num_local: int, timeout_s: float, later_s: float, *, by_torchrun: bool
) -> dict[str, Any]:
    """Train, cut the link at one end, and return how both machines ended.

    Args:
        place: An empty directory.
        end: The node at which it is cut.
        num_local: Ranks of each.
        timeout_s: `parallel.timeout`.
        later_s: How long after the fourth step.
        by_torchrun: Ranks are started by it, and else by themselves.
    """
    config = described(place, "run", 100_000, timeout_s)
    with (
        Machines(place) as machines,
        started(machines, config, num_local, place, by_torchrun=by_torchrun) as processes,
    ):
        _await_steps(place / "run/metrics.jsonl", 4, processes, place)
        time.sleep(later_s)
        machines.cut(end)
        began_s = time.monotonic()
        ended_s: dict[int, float] = {}
        while len(ended_s) < len(processes) and time.monotonic() - began_s < LIMIT_S:
            for number, process in enumerate(processes):
                if number not in ended_s and process.poll() is not None:
                    ended_s[number] = time.monotonic() - began_s
            time.sleep(0.05)
    seconds = [round(ended_s.get(number, LIMIT_S), 1) for number in range(len(processes))]
    said = [(place / f"said{node}").read_text() for node in range(2)]
    codes = [process.returncode for process in processes]
    if by_torchrun:  # it says what its ranks have ended with, and ends with a code of its own
        codes = [int(code) for text in said for code in re.findall(r"exitcode +: (-?\d+)", text)]
    sentences = [re.findall(r"^error: .*", text, re.MULTILINE) for text in said]
    return {
        "end": end,
        "ranks_per_node": num_local,
        "by_torchrun": by_torchrun,
        "later_s": round(later_s, 3),
        "ended_after_s": seconds,
        "codes": codes,
        "sentences": [[re.sub(r"process \d+ on", "process N on", one) for one in some] for some in sentences],
        "is_as_promised": (
            max(seconds) <= timeout_s + GRACE_S
            and codes == [RankError.exit_code] * 2 * num_local
            and all(len(some) == 1 for some in sentences)
        ),
    }


def described(place: Path, out: str, steps: int, timeout_s: float = 60.0) -> Path:
    """Write the file of a run that any number of ranks up to four trains to the same bits."""
    config = make_config(
        place,
        out,
        train={"steps": steps, "grad_accumulation": 4},
        parallel={"shards": 4, "timeout": timeout_s},
        checkpoint={"every": None},
        log={"report": False},
    )
    path = place / f"{out}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return path


@contextmanager
def started(
    machines: Machines, config: Path, num_local: int, place: Path, *, by_torchrun: bool
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a run on both machines; what is still there at the end is killed.

    Yields:
        The processes: torchrun's on each machine, or all ranks.
    """
    host, port = machines.addresses[0], 29500
    processes = []
    for node in range(2):
        meeting = ["--master-addr", host, "--master-port", str(port)]
        which = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(num_local)]
        launcher = [sys.executable, "-m", "torch.distributed.run", *which, *meeting]
        with (place / f"said{node}").open("wb") as said:
            for local_rank in range(1 if by_torchrun else num_local):
                told = {
                    "RANK": node * num_local + local_rank,
                    "LOCAL_RANK": local_rank,
                    "WORLD_SIZE": 2 * num_local,
                    "LOCAL_WORLD_SIZE": num_local,
                    "MASTER_ADDR": host,
                    "MASTER_PORT": port,
                }
                command = [*launcher, *_train(config)[1:]] if by_torchrun else _train(config)
                process = subprocess.Popen(
                    command,
                    env=_environment() | ({} if by_torchrun else {n: str(v) for n, v in told.items()}),
                    preexec_fn=lambda node=node: machines.enter(node),  # type: ignore[misc]
                    stdout=said,
                    stderr=said,
                )
                processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _train(config: Path) -> list[str]:
    return [sys.executable, "-m", "megatrain", "train", str(config)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _await_steps(
    metrics: Path, count: int, processes: Sequence[subprocess.Popen[bytes]], place: Path
) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        if time.monotonic() > until_s or any(process.poll() is not None for process in processes):
            raise SystemExit("".join((place / f"said{node}").read_text() for node in range(2)))
        time.sleep(0.05)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
