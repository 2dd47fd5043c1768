"""What ranks are held to bit for bit, and all random kills, run whole and recorded with the commit.

    python -m benchmarks.distributed.matrix [--workers 2] [--only EXPRESSION] [--out FILE]

It measures nothing: it runs the parity tests of ranks, and writes for each test how many rows have passed,
failed and been skipped, which ones failed, and their seconds. It ends with pytest's status. `--only` takes
some of them, as pytest's `-k` does: `every_pair` is the matrix, and `random` are the kills.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.report import emit, hardware

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Run them, and write down how they ended."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--workers", type=int, default=2, help="tests at a time, in processes (default: 2)")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="of the tests' names (default: all)")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    at_start, begin_s = hardware(), time.monotonic()
    command = ["-m", "pytest", "-q", "-m", "parity", "-k", arguments.only, "tests/distributed"]
    if arguments.workers > 1:
        command += ["-n", str(arguments.workers), "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as place:
        told = Path(place, "told.xml")
        code = subprocess.run(
            [sys.executable, *command, f"--junitxml={told}"], cwd=ROOT, check=False
        ).returncode
        cases = list(ElementTree.parse(told).iter("testcase")) if told.exists() else []
    found = {"exit_code": code, "seconds": round(time.monotonic() - begin_s), "tests": summed(cases)}
    emit({"hardware": at_start, "arguments": vars(arguments), **found}, arguments.out)
    sys.exit(code)


def summed(cases: Iterable[ElementTree.Element]) -> dict[str, dict[str, Any]]:
    """Count by test how its rows have ended.

    Args:
        cases: As pytest writes them for JUnit.
    """
    tests: dict[str, dict[str, Any]] = {}
    for case in cases:
        name, _, row = case.attrib["name"].partition("[")
        test = tests.setdefault(
            f"{case.attrib['classname']}.{name}",
            {"passed": 0, "skipped": 0, "failed": [], "seconds": 0.0},
        )
        test["seconds"] = round(test["seconds"] + float(case.attrib["time"]), 1)
        if case.find("failure") is not None or case.find("error") is not None:
            test["failed"].append(row.removesuffix("]"))
        else:
            test["skipped" if case.find("skipped") is not None else "passed"] += 1
    return tests


if __name__ == "__main__":
    main()
