"""Whether a command that met a fault ended as it must, and left what a resume goes on from."""

from __future__ import annotations

import os

from tests.faults.scenarios import Bench, Fault, is_probe, state_key

_LOST = "it could not be opened, and now it can"
"""What is said of an error that safetensors has kept for itself."""


def judge(bench: Bench, scenario: str, fault: Fault, call: str) -> list[str]:
    """Run one case; return what is wrong, in words."""
    bench.begin(scenario)
    answer = bench.server.ask(bench.command(scenario), fault)
    shown = answer["out"] + answer["err"]
    problems = []
    cause = os.strerror(fault.number)
    if "Traceback" in shown or "Exception ignored" in shown:
        problems.append(f"traceback: {shown[-3000:]}")
    elif answer["code"] != 0:
        errors = [line for line in shown.splitlines() if line.lower().startswith("error: ")]
        if answer["code"] not in (2, 3, 4):
            problems.append(f"exit code {answer['code']}: {shown[-600:]}")
        elif len(errors) != 1 or len(errors[0]) > 700:
            problems.append(f"not one sentence: {shown[-2000:]}")
        elif str(bench.root) not in errors[0]:
            problems.append(f"no path: {errors[0]}")
        elif not is_probe(call) and cause not in errors[0] and _LOST not in errors[0]:
            problems.append(f"no cause: {errors[0]}")
    if scenario == "export":
        problems += _after_export(bench, fault, answer["code"])
    else:
        problems += _after_run(bench, bench.command(scenario), answer["code"])
    return [f"{scenario}: {fault}: {call}: {problem}" for problem in problems]


def _after_run(bench: Bench, command: list[str], code: int) -> list[str]:
    """A run that ended well has the model of the uninterrupted one; any other goes on to it, or refuses."""
    if code == 0 and bench.result() != bench.expected:
        return ["ended well with another model"]
    key = f"{command} {state_key(bench.root)}"
    if key not in bench.resumed:
        again = bench.server.ask(command)
        bench.resumed[key] = ""
        if again["code"] != 0:
            bench.resumed[key] = f"the resume ends with {again['code']}: {again['err'][-2000:]}"
        elif bench.result() != bench.expected:
            bench.resumed[key] = f"the resume ends with another model: {again['err'][-2000:]}"
        left = [path.name for path in (bench.root / "run").rglob(".*")]
        if left and not bench.resumed[key]:
            bench.resumed[key] = f"the resume leaves {left}"
    return [bench.resumed[key]] if bench.resumed[key] else []


def _after_export(bench: Bench, fault: Fault, code: int) -> list[str]:
    """An export is whole or absent, and nothing else is left if the fault was a single one."""
    out = bench.root / "exported"
    model = {path.name: path.read_bytes() for path in (bench.root / "run/hf").iterdir()}
    problems = []
    if out.exists() and {path.name: path.read_bytes() for path in out.iterdir()} != model:
        problems.append(f"half an export: {sorted(path.name for path in out.iterdir())}")
    if code == 0 and not out.exists():
        problems.append("ended well without an export")
    left = [path.name for path in bench.root.glob(".*")]
    if left and not fault.always:
        problems.append(f"left {left}")
    return problems
