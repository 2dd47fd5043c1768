"""Run each scenario once for each call of its save, and kill -9 the process at that call.

Run as `python -m tests.checkpoint.killing DIRECTORY`; prints one JSON object per killed save. It forks, so it
has no threads: nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from megatrain import files
from tests.checkpoint.faults import SCENARIOS, Killed, Scenario, Watched


def main(directory: Path) -> None:
    """Leave behind `directory/<n>` for each killed save."""
    count = 0
    for name, scenario in SCENARIOS.items():
        template = directory / name
        template.mkdir()
        scenario.prepare(template / "checkpoints")
        calls = scenario_calls(scenario, template)
        whole = [(at, False) for at in range(len(calls))]
        half = [(at, True) for at, call in enumerate(calls) if call == "write"]
        for at, torn in whole + half:
            root = shutil.copytree(template, directory / str(count)) / "checkpoints"
            kill(scenario, root, at, torn=torn)
            print(json.dumps({"root": str(root), "scenario": name, "at": at, "torn": torn}))
            count += 1


def scenario_calls(scenario: Scenario, template: Path) -> list[str]:
    """Run a scenario to its end, on a copy, and list its calls."""
    calls = []

    class Listed(Watched):
        def before(self, call: str, path: Path) -> None:
            calls.append(call)

    root = shutil.copytree(template, template.with_name(f"{template.name} whole")) / "checkpoints"
    files.system = Listed()
    scenario.run(root)
    files.system = Watched()
    return calls


def kill(scenario: Scenario, root: Path, at: int, *, torn: bool) -> None:
    """Run a scenario in a process that dies at a call."""
    child = os.fork()
    if child == 0:
        files.system = Killed(at, torn=torn)
        scenario.run(root)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGKILL, (status, at)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    files.system = Watched()
    main(Path(sys.argv[1]))
