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
import faulthandler
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 20.0
"""A step that goes on so long after its limit hangs where no signal reaches it: its process is ended."""
GRACE_S = 6.0
"""A process may go on so long after the time for all."""
LEAST_S = 5.0
"""With less time than this no step is begun."""


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the table."""

    group: str
    limit_s: float
    expected_s: float
    """On an H200, from the FLOPs and bytes of the step: no measurement."""
    function: str
    """`module:function`; cells get the process's session, the others whether the run is dry."""
    process: str = ""
    """Steps of one such name that follow each other share a process."""


def _cell(group: str, limit_s: float, expected_s: float, name: str, **options: str) -> Step:
    module = options.pop("module", "benchmarks.gpu.cells")
    return Step(group, limit_s, expected_s, f"{module}:cell_{name}", **options)


STEPS: dict[str, Step] = {
    "environment": Step("correctness", 45, 15, "benchmarks.gpu.rates:environment"),
    "device_adamw": Step("correctness", 45, 15, "benchmarks.gpu.correctness:device_adamw"),
    "parity": Step("correctness", 150, 90, "benchmarks.gpu.correctness:parity"),
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
    if arguments.child:
        run_here(arguments.child.split(","), arguments.out, arguments.seconds, is_dry=arguments.dry_run)
        return
    steps = chosen_steps(arguments.steps.split(","))
    if isinstance(steps, str):
        parser.error(steps)
    results = run_all(steps, arguments.out, arguments.seconds, is_dry=arguments.dry_run)
    print(json.dumps(summary(results, arguments.out, is_dry=arguments.dry_run)), flush=True)
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


# -- the steps, each process from outside ------------------------------------------------------------------


def run_all(steps: Sequence[str], out: Path, seconds: float, *, is_dry: bool) -> dict[str, dict[str, Any]]:
    """Run steps in processes, and return what each of them wrote."""
    stop = time.monotonic() + seconds
    expected = sum(STEPS[step].expected_s for step in steps)
    print(f"{len(steps)} steps, about {expected:.0f} s on an H200; {seconds:.0f} s are given", flush=True)
    for step in steps:
        (out / f"{step}.json").unlink(missing_ok=True)
    for together in in_processes(steps, is_dry=is_dry):
        left = together
        while left:
            if stop - time.monotonic() < LEAST_S:
                for step in left:
                    settle(out, step, "skipped: no time left")
                break
            status = run_apart(left, out, stop - time.monotonic(), is_dry=is_dry)
            left = unfinished(out, left, status)
    collect(out)
    return {step: read_step(out, step) for step in steps}


def in_processes(steps: Sequence[str], *, is_dry: bool) -> Iterator[list[str]]:
    """Group steps that follow each other and share a process; a dry run has one process for all."""
    key: Callable[[str], str] = lambda step: "" if is_dry else STEPS[step].process or step  # noqa: E731
    for _, together in itertools.groupby(steps, key):
        yield list(together)


def run_apart(steps: Sequence[str], out: Path, seconds: float, *, is_dry: bool) -> str:
    """Run steps in one process, and say how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.suite"]
    command += ["--child", ",".join(steps), "--out", str(out.resolve())]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if STEPS[steps[0]].group == "correctness":
        # cuBLAS is deterministic only with a workspace of this form; it is read when the library starts.
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    elif not is_dry:
        environment.pop("OMP_NUM_THREADS", None)  # rivals use torch's threads
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # cells fill the device
    command += ["--seconds", str(seconds), *(["--dry-run"] if is_dry else [])]
    try:
        done = subprocess.run(command, timeout=seconds + GRACE_S, cwd=ROOT, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return "stopped: no time left"
    return f"failed: the process ended with {done.returncode}"


def unfinished(out: Path, steps: Sequence[str], status: str) -> list[str]:
    """Give the step in which a process ended its status, and return those that were not begun."""
    for number, step in enumerate(steps):
        result = read_step(out, step)
        if result["status"] in ("running", "not run"):
            settle(out, step, status)
            return list(steps[number + 1 :])
    return []


def settle(out: Path, step: str, status: str) -> None:
    """Write a step's status for it."""
    result = {**read_step(out, step), "status": status}
    (out / f"{step}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"== {step}: {status}", flush=True)


def read_step(out: Path, step: str) -> dict[str, Any]:
    """Return what a step has written."""
    path = out / f"{step}.json"
    return json.loads(path.read_text()) if path.exists() else {"status": "not run"}


def collect(out: Path) -> None:
    """Put everything that the directory has into one file, with the gates."""
    from benchmarks.gpu.page import gates

    results = {step: read_step(out, step) for step in STEPS if (out / f"{step}.json").exists()}
    whole = {"benchmark": "gpu_suite", "steps": results, "gates": gates(results)}
    part = out / "suite.part"
    part.write_text(json.dumps(whole, indent=1) + "\n")
    part.replace(out / "suite.json")


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


# -- the steps, inside a process ---------------------------------------------------------------------------


def run_here(steps: Sequence[str], out: Path, seconds: float, *, is_dry: bool) -> None:
    """Run steps in this process, one after the other."""
    from benchmarks.gpu.engine import Session

    stop = time.monotonic() + seconds
    if is_dry:
        import torch

        torch.set_num_threads(1)  # tiny shapes on a busy machine: threads would only wait for each other
    session = Session(out, is_dry)
    for step in steps:
        limit = min(STEPS[step].limit_s, stop - time.monotonic())
        if limit < LEAST_S:
            settle(out, step, "skipped: no time left")
            continue
        is_usable = run_step(step, session, limit)
        collect(out)
        if not is_usable:
            sys.exit(3)


def run_step(name: str, session: Any, limit: float) -> bool:
    """Run one step within its limit; returns whether the process is fit for another."""
    from benchmarks.gpu.run import Record, TimeLimitError, UnavailableError, limited

    record = Record(session.out / f"{name}.json")
    record.add(is_dry=session.is_dry)
    started = time.monotonic()
    is_usable = True
    faulthandler.dump_traceback_later(limit + HANG_S, exit=True)
    try:
        module, function = STEPS[name].function.split(":")
        run = getattr(importlib.import_module(module), function)
        with limited(limit) as until:
            session.until = until - min(15.0, limit / 8)  # for detaching
            run(record, session if function.startswith("cell_") else session.is_dry)
        status = "ok"
    except UnavailableError as error:
        status = f"unavailable: {error}"
    except TimeLimitError as error:
        status = str(error)
    except Exception as error:
        traceback.print_exc()
        status = "failed"
        record.add(error=f"{type(error).__name__}: {error}"[:2000])
        is_usable = "CUDA error" not in str(error)  # which stays with the process
    finally:
        faulthandler.cancel_dump_traceback_later()
    record.add(status=status, seconds=time.monotonic() - started)
    print(f"== {name}: {status} after {record.values['seconds']:.0f} s", flush=True)
    return is_usable


if __name__ == "__main__":
    main()
