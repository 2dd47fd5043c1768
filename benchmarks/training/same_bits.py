"""Do two checkouts of this repository train to the same bits? Eighteen short runs, every choice spelled out.

    python -m benchmarks.training.same_bits --reference CHECKOUT [--other CHECKOUT] [--only NAME] [--out FILE]

Each checkout runs in a process of its own, side by side on this machine, with its own code and the same
PyTorch, models, seeds and settings. The runs differ in family, precision, schedule of the optimizer, policies
of activations, fragments, micro-batches in lockstep, residency, tiers (RAM, one or two drives, boundaries on
drives), format of the moments and lanes. After each, the SHA-256 of every loss and gradient norm, and of
every weight, fp32 master, remainder and moment must be equal; and both must have run as they were asked to.
Six more are `megatrain train` on two ranks: moments in bf16 and in int8, state on drives, pairs, rows that
are shared out. Of these the losses of evaluations are compared too, and all tensors of the last checkpoint
and of the exported model.

Without `--other`, the second checkout is the one that this script is in. The result is a table; the last line
is JSON; the exit status is 1 if anything differs or does not run. A checkout whose `Choice` has a field that
is not spelled out here is refused, since a default could make another run of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import emit, hardware
from benchmarks.training.checkout_runs import COMMANDS, RUNS

ROOT = Path(__file__).resolve().parents[2]
ASKED = {**RUNS, **COMMANDS}
WORKER = Path(__file__).with_name("checkout_worker.py")
MOST_NAMED = 5
"""Values that differ are named up to this number."""


def main() -> None:
    """Run both checkouts and compare them."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--reference", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--other", type=Path, default=ROOT, help="default: the one that this script is in")
    parser.add_argument("--only", choices=ASKED, action="append", help="may be given several times")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    names = arguments.only or list(ASKED)
    checkouts = [arguments.reference.resolve(), arguments.other.resolve()]
    with ThreadPoolExecutor() as pool:
        reference, other = pool.map(lambda checkout: run_all(checkout, names), checkouts)
    rows = {name: compare(reference[name], other[name]) for name in names}
    for line in table(rows):
        print(line)
    num_different = sum(bool(row["differences"]) for row in rows.values())
    emit(
        {
            "benchmark": "same_bits",
            "runs": len(rows),
            "runs_that_differ": num_different,
            "values_compared": sum(row["values"] for row in rows.values()),
            "details": rows,
            "commits": [commit_of(checkout) for checkout in checkouts],
            "hardware": hardware(),
        },
        arguments.out,
    )
    sys.exit(num_different > 0)


def run_all(checkout: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Make the runs with a checkout's code; returns the worker's report of each.

    A report has `values` (digests by name) and `asked_but_not_so`, or an `error`.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(WORKER), str(checkout), "bits"]
    asked = json.dumps({name: ASKED[name] for name in names})
    done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reports = {line.pop("name"): line for line in lines}
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {name: reports.get(name, {"error": f"the process ended: {last}"}) for name in names}


def compare(reference: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many values two reports of one run have, and what differs, in words."""
    differences = [f"{side['error']}" for side in (reference, other) if "error" in side]
    if differences:
        return {"values": 0, "differences": differences}
    for side in (reference, other):
        differences += [f"not arranged as asked: {what}" for what in side["asked_but_not_so"]]
    left, right = reference["values"], other["values"]
    if not left:
        differences.append("no value was reported")
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            differences.append(f"{name} is only in {'one' if name in left else 'the other'}")
        elif left[name] != right[name]:
            differences.append(f"{name} differs")
    return {"values": len(left), "differences": differences}


def table(rows: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'run':<54} {'values':>6}  "
    for name, row in rows.items():
        found = row["differences"]
        yield f"{name:<54} {row['values']:>6}  {f'{len(found)} DIFFER' if found else 'equal'}"
        yield from (f"    {what}" for what in found[:MOST_NAMED])
        if len(found) > MOST_NAMED:
            yield f"    and {len(found) - MOST_NAMED} more"


def commit_of(checkout: Path) -> str | None:
    """Return a checkout's commit; None for a directory that git does not know."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


if __name__ == "__main__":
    main()
