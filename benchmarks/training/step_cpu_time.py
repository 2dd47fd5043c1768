"""The CPU time of a step of a small model, with the code of two checkouts in turn.

    python -m benchmarks.training.step_cpu_time --reference CHECKOUT [--other CHECKOUT] [--run NAME]
        [--pairs 3] [--turns 20] [--steps 25] [--warm-up 10] [--out FILE]

The model is so small that nearly all of a step is what megatrain itself does. A pair is a process for each
checkout; they take turns of some steps, A B A B, while the other waits in a read of a pipe. A turn's time is
what the process says of itself: user and system CPU seconds of all its threads, from one `engine.sync()` to
the next, so that updates in the background count. The result is the median over all turns of the ratio of the
other checkout to the reference within a turn; several pairs, since two processes with the same code differ a
little. Without `--other`, that is the checkout that this script is in; the reference against itself says how
exact the figure is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.report import emit, hardware, spread
from benchmarks.training.checkout_runs import RUNS
from benchmarks.training.same_bits import ROOT, WORKER, commit_of


def main() -> None:
    """Measure both checkouts and compare them."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--reference", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--other", type=Path, default=ROOT, help="default: the one that this script is in")
    parser.add_argument(
        "--run", choices=RUNS, default="llama fp32 deferred recompute", help="what is trained"
    )
    parser.add_argument("--pairs", type=int, default=3, help="of processes")
    parser.add_argument("--turns", type=int, default=20, help="of each pair")
    parser.add_argument("--steps", type=int, default=25, help="of a turn")
    parser.add_argument("--warm-up", type=int, default=10, help="steps of each process that are not counted")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    checkouts = [arguments.reference.resolve(), arguments.other.resolve()]
    pairs = []
    for number in range(arguments.pairs):
        sides = [Side(checkout, arguments.run) for checkout in checkouts]
        for side in sides:
            side.cpu_time(arguments.warm_up)
        pairs.append(
            [tuple(side.cpu_time(arguments.steps) for side in sides) for _ in range(arguments.turns)]
        )
        for side in sides:
            side.close()
        print(
            f"pair {number}: {statistics.median(b / a for a, b in pairs[-1]):.4f} of the reference",
            flush=True,
        )
    turns = [turn for pair in pairs for turn in pair]
    emit(
        {
            "benchmark": "step_cpu_time",
            "other_over_reference": statistics.median(b / a for a, b in turns),
            "by_pair": [statistics.median(b / a for a, b in pair) for pair in pairs],
            "reference_cpu_s_per_step": spread([a for a, _ in turns]),
            "other_cpu_s_per_step": spread([b for _, b in turns]),
            "config": {"run": arguments.run, "steps": arguments.steps, "turns": arguments.turns},
            "commits": [commit_of(checkout) for checkout in checkouts],
            "hardware": hardware(),
        },
        arguments.out,
    )


class Side:
    """A checkout's process."""

    def __init__(self, checkout: Path, run: str) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(checkout), "cpu_time"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._tell(json.dumps(RUNS[run]))

    def cpu_time(self, num_steps: int) -> float:
        """Let it take steps, and return the CPU seconds of one."""
        assert self._process.stdout is not None
        self._tell(str(num_steps))
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a checkout's process ended with {self._process.wait()}; its reason is above")
        return float(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; reading its answer says so
            print(line, file=self._process.stdin, flush=True)


if __name__ == "__main__":
    main()
