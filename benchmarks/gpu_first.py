"""The first ten minutes on a GPU: what to run before anything else, in one command.

    python benchmarks/gpu_first.py [--out DIR] [--steps imports,smoke,...] [--budget-s 560] [--tiny]

or `python -m benchmarks.gpu_first` in the root of the checkout; megatrain need not be installed. It ends with
a table of what is right, what is not and how fast it is, and with status 1 if a step that judges correctness
is not ok; then comes `benchmarks.gpu.suite`.

Each step has a process and a time limit of its own, and writes `DIR/<step>.json` as it goes, so that one that
fails or hangs does not end the rest and leaves what it has found; where its threads were is in
`DIR/<step>.stack`. `DIR/first.json` has all steps with the hardware, the versions and the commit.

`--tiny` takes tiny shapes, and one process for all steps. `--device` is `auto` (what torch offers), a name as
in `megatrain.attach`, or `host`: the device of tests/host_device, made of host memory, on which the whole
script runs without an accelerator.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # python benchmarks/gpu_first.py: the checkout takes the place of its folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu.run import ROOT, write_json
from benchmarks.gpu.steps import Runner, Step, read_step

_FIRST, _SHAPE = "benchmarks.gpu.first", "benchmarks.gpu.shape"
STEPS: dict[str, Step] = {
    "imports": Step("correctness", 60, 15, f"{_FIRST}:imports"),
    "smoke": Step("correctness", 50, 20, f"{_FIRST}:smoke"),
    "rates": Step("speed", 50, 25, f"{_FIRST}:rates"),
    "streamed": Step("speed", 150, 90, f"{_SHAPE}:cell_streamed"),
    "syncs": Step("correctness", 45, 20, f"{_FIRST}:synchronisations"),
    "side_by_side": Step("speed", 90, 45, f"{_SHAPE}:cell_side_by_side"),
    "packed": Step("speed", 120, 60, f"{_SHAPE}:cell_packed"),
    "parity": Step("correctness", 110, 50, f"{_FIRST}:parity_rows", process="right"),
    "races": Step("correctness", 60, 20, f"{_FIRST}:two_races", process="right"),
    "attention": Step("correctness", 60, 20, f"{_FIRST}:default_attention", process="right"),
    "adamw": Step("correctness", 60, 20, f"{_FIRST}:adamw", process="right"),
    "long_attention": Step("speed", 40, 20, f"{_FIRST}:long_attention"),
    "locking": Step("speed", 45, 20, f"{_FIRST}:locking"),
    "ranks": Step("correctness", 150, 70, "benchmarks.gpu.ranks:ranks"),
    "shape": Step("speed", 260, 180, f"{_SHAPE}:cell_shape"),
}
"""In this order the first five minutes tell most: whether it runs, and how fast blocks stream; then whether
results are right, and the rest. A run that has less time than all of them take is given `--steps`."""
BUDGET_S = 560.0
"""Under ten minutes, with the start of ten processes and the table."""


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    today = datetime.date.today().isoformat()
    results = ROOT / "benchmarks" / "results" / f"{today}-gpu-first"
    parser.add_argument("--out", type=Path, default=results, help="directory for what is found")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"of {', '.join(STEPS)} (default: all)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="time for all steps (default: 560)")
    parser.add_argument("--tiny", "--dry-run", dest="is_tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--device", default="auto", help="auto, cuda, xpu or host (default: auto)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(
        module="benchmarks.gpu_first",
        steps=STEPS,
        out=arguments.out,
        is_dry=arguments.is_tiny,
        device=arguments.device,
        collect=collect,
    )
    if arguments.child:
        runner.run_here(arguments.child.split(","), arguments.seconds)
        return
    names = arguments.steps.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"unknown steps: {', '.join(unknown)}; there are {', '.join(STEPS)}")
    found = runner.run_all(names, arguments.budget_s)
    print("\n".join(table(found)), flush=True)
    sys.exit(any(STEPS[name].group == "correctness" and not is_ok(found[name]) for name in names))


def is_ok(result: Mapping[str, Any]) -> bool:
    return bool(result["status"] == "ok")


def collect(out: Path) -> None:
    """Put everything that the directory has into one file."""
    results = {name: read_step(out, name) for name in STEPS if (out / f"{name}.json").exists()}
    hardware = results.get("imports", {}).get("hardware")
    write_json(out / "first.json", {"benchmark": "gpu_first", "hardware": hardware, "steps": results})


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each step: whether it is ok, how long it took, and the gist or the first error."""
    lines = []
    for name, result in found.items():
        word = "ok" if is_ok(result) else "FAILED"
        why = "" if is_ok(result) else result.get("error", result["status"]).splitlines()[0][:200]
        lines.append(f"{word:6}  {name:9} {result.get('seconds', 0.0):5.0f} s  {why or result['gist']}")
        if not is_ok(result) and "stage" in result:
            lines.append(f"{'':27}it came as far as: {result['stage']}")
    return lines


if __name__ == "__main__":
    main()
