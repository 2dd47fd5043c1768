"""Runs command lines in forks of one process that has imported everything: `python -m tests.faults.server`.

Reads one JSON request per line and answers each with one line. The shim is armed in the fork, and what the
command then does is what a fresh process would, less the imports.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from megatrain.cli import main
from tests.faults import shim
from tests.searches import searched_for_a_moment

LIMIT_S = 120


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run one command line in a fork; returns its exit code, what it showed, and the calls it made."""
    with tempfile.TemporaryDirectory() as place:
        shown = {name: Path(place, name) for name in ("out", "err", "calls")}
        child = os.fork()
        if child == 0:
            _be_the_command(request, shown)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = {name: path.read_text() if path.exists() else "" for name, path in shown.items()}
    return {"code": status, "out": text["out"], "err": text["err"], "calls": text["calls"].splitlines()}


def _be_the_command(request: dict[str, Any], shown: dict[str, Path]) -> None:
    code: Any = 1
    try:
        signal.alarm(LIMIT_S)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(shown[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.chdir(request["root"])
        where, at, number = Path(request["root"]), request["at"], request["errno"]
        shim.arm(where, at, number, always=request["always"], only=request["only"])
        code = _outcome(request["arguments"])
        calls = shim.disarm()
        sys.stdout.flush()
        sys.stderr.flush()
        shown["calls"].write_text("\n".join(calls))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _outcome(arguments: list[str]) -> Any:
    try:
        main(arguments)
    except SystemExit as ended:
        return ended.code or 0
    except BaseException:  # as the interpreter would
        traceback.print_exc()
        return 1
    return 0


def serve() -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is shown here is no answer
    for line in sys.stdin:
        request = json.loads(line)
        if request.get(
            "warms"
        ):  # in this very process: all that is imported, compiled and cached is there for all
            os.chdir(request["root"])
            result: dict[str, Any] = {"code": _outcome(request["arguments"])}
            gc.freeze()  # no fork looks at all this again
        else:
            result = run(request)
        answers.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    with searched_for_a_moment():
        serve()
