"""Correctness, rates and speed on one CUDA device, in one command.

    python -m benchmarks.gpu.suite --out DIR [--steps correctness,rates,...] [--seconds N] [--dry-run]
    python -m benchmarks.gpu.suite --report DIR

in the root of the checkout; megatrain need not be installed, PyTorch and transformers must be.

Steps run in the order given, each with a time limit of its own; one that fails or runs out of time does not
stop the next. Every step writes `DIR/<step>.json` as it goes, so that a step that was stopped leaves what it
had found; `DIR/suite.json` has all that DIR has seen, and the gates. Steps of one model that follow each
other share a process and its host state. `--steps` takes steps and groups; all of them take three or four
calls of ten minutes:

    --steps correctness,rates     --steps 8b     --steps 3b     --steps more

`--report` writes `benchmarks/results/<date>-<gpu>.md` from what is in DIR, missing steps with the reason.
`--dry-run` runs everything on the CPU with tiny shapes, to test the scripts themselves.

The rivals of `3b` need packages of their own (`rivals`); one that is not there is recorded as that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import ROOT, write_json
from benchmarks.gpu.steps import Runner, Step, read_step


def _cell(group: str, limit_s: float, expected_s: float, name: str, **options: str) -> Step:
    module = options.pop("module", "benchmarks.gpu.cells")
    return Step(group, limit_s, expected_s, f"{module}:cell_{name}", **options)


STEPS: dict[str, Step] = {
    "environment": Step("correctness", 45, 15, "benchmarks.gpu.rates:environment"),
    "device_adamw": Step("correctness", 45, 15, "benchmarks.gpu.correctness:device_adamw"),
    "parity": Step("correctness", 150, 90, "benchmarks.gpu.correctness:parity"),
    "attention": Step("correctness", 90, 25, "benchmarks.gpu.attention:attention"),
    "head": Step("correctness", 60, 20, "benchmarks.gpu.head:head"),
    "races": Step("correctness", 110, 70, "benchmarks.gpu.races:races"),
    "syncs": Step("correctness", 45, 20, "benchmarks.gpu.races:syncs"),
    "compiled": Step("correctness", 120, 70, "benchmarks.gpu.correctness:compiled"),
    "rates": Step("rates", 70, 40, "benchmarks.gpu.rates:rates"),
    "8b_32k": _cell("8b", 270, 190, "8b_32k", process="8b"),
    "8b_seq8k": _cell("8b", 180, 120, "8b_seq8k", process="8b"),
    "8b_128k": _cell("8b", 140, 95, "8b_128k", process="8b"),
    "8b_24gb": _cell("8b", 120, 80, "8b_24gb", process="8b"),
    "8b_80gb": _cell("8b", 120, 80, "8b_80gb", process="8b"),
    "3b_ours": _cell("3b", 170, 110, "3b_ours"),
    "3b_deepspeed": _cell("3b", 240, 170, "3b_deepspeed", module="benchmarks.gpu.rivals"),
    "3b_fsdp2": _cell("3b", 170, 110, "3b_fsdp2", module="benchmarks.gpu.rivals"),
    "resident": _cell("more", 110, 60, "resident", module="benchmarks.gpu.rivals"),
    "depth": _cell("more", 150, 90, "depth"),
    "120b": _cell("more", 190, 140, "120b"),
    "8b_512k": _cell("more", 260, 200, "8b_512k", process="8b"),
}
"""In order of importance."""
CELL_GROUPS = ("8b", "3b", "more")


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--out", type=Path, help="directory for the JSON files")
    parser.add_argument("--steps", default="all", help=f"of {', '.join([*groups(), *STEPS])} (default: all)")
    parser.add_argument("--seconds", type=float, default=585.0, help="time for all steps (default: 585)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--report", type=Path, nargs="+", metavar="DIR", help="write the report of DIR")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help=argparse.SUPPRESS
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report:
        from benchmarks.gpu.page import read_all, write_report

        print(write_report(read_all(arguments.report), list(STEPS), arguments.results))
        return
    if arguments.out is None:
        parser.error("--out is missing: a directory for the JSON files")
    arguments.out.mkdir(parents=True, exist_ok=True)
    is_dry = arguments.dry_run
    runner = Runner(
        module="benchmarks.gpu.suite", steps=STEPS, out=arguments.out, is_dry=is_dry, collect=collect
    )
    if arguments.child:
        runner.run_here(arguments.child.split(","), arguments.seconds)
        return
    steps = chosen_steps(arguments.steps.split(","))
    if isinstance(steps, str):
        parser.error(steps)
    results = runner.run_all(steps, arguments.seconds)
    print(json.dumps(summary(results, arguments.out, is_dry=is_dry)), flush=True)
    sys.exit(any(not result["status"].startswith(("ok", "unavailable")) for result in results.values()))


def groups() -> dict[str, list[str]]:
    """Return the steps of each group."""
    found: dict[str, list[str]] = {"all": list(STEPS)}
    for name, step in STEPS.items():
        found.setdefault(step.group, []).append(name)
    return {**found, "cells": [name for name, step in STEPS.items() if step.group in CELL_GROUPS]}


def chosen_steps(words: Sequence[str]) -> list[str] | str:
    """Return the steps that words name, each once; or what is wrong with a word."""
    known = groups()
    unknown = [word for word in words if word not in known and word not in STEPS]
    if unknown:
        return f"unknown steps: {', '.join(unknown)}; there are {', '.join([*known, *STEPS])}"
    return list(dict.fromkeys(name for word in words for name in known.get(word, [word])))


def collect(out: Path) -> None:
    """Put everything that the directory has into one file, with the gates."""
    from benchmarks.gpu.page import gates

    results = {step: read_step(out, step) for step in STEPS if (out / f"{step}.json").exists()}
    write_json(out / "suite.json", {"benchmark": "gpu_suite", "steps": results, "gates": gates(results)})


def summary(results: dict[str, dict[str, Any]], out: Path, *, is_dry: bool) -> dict[str, Any]:
    """Return what the last line says: statuses and gates."""
    whole = json.loads((out / "suite.json").read_text())
    statuses = {step: result["status"] for step, result in results.items()}
    hardware = whole["steps"].get("environment", {}).get("hardware")
    return {
        "benchmark": "gpu_suite",
        "dry_run": is_dry,
        "steps": statuses,
        "gates": whole["gates"],
        "hardware": hardware,
    }


if __name__ == "__main__":
    main()
