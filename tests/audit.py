"""Asks an index for known faults of the packages in use: `python -m tests.audit`, as `make audit` does.

Ends with 1 if there are any. Where no index can be asked, it says so in a line and ends with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_LONGEST_S = 300
COMMAND = (sys.executable, "-m", "pip_audit", "--local", "--format", "json", "--progress-spinner", "off")


def audit() -> int:
    """Print what is known of the packages of this environment, and return the exit code."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        print("audit: skipped, since the index did not answer in time")
        return 0
    report = _parsed(done.stdout)
    if report is None:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"audit: skipped, since pip-audit could not ask an index ({said[:200]})")
        return 0
    packages = [package for package in report["dependencies"] if "skip_reason" not in package]
    num_unknown = len(report["dependencies"]) - len(packages)
    if not packages:
        print(f"audit: skipped, since the index knows none of {num_unknown} packages")
        return 0
    faults = [(package, fault) for package in packages for fault in package.get("vulns", ())]
    for package, fault in faults:
        mended = " or ".join(fault.get("fix_versions") or ["no version yet"])
        print(f"audit: {package['name']} {package['version']} has {fault['id']}; mended in {mended}")
    if not faults:
        print(f"audit: no fault is known of {len(packages)} packages; {num_unknown} are not in the index")
    return 1 if faults else 0


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        report = json.loads(text)
    except ValueError:
        return None
    return report if isinstance(report, dict) and "dependencies" in report else None


if __name__ == "__main__":
    sys.exit(audit())
