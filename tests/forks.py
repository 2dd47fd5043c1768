"""Runs scripts in forks of one interpreter that has imported torch, transformers and what else takes seconds.

A fork is what a fresh interpreter would be once these are imported: nothing of megatrain is, unless a script
is to run `after` a module of it. It ends as any program does, with its own exit code, through Python's own
finalisation (the script runs at the top level, and the server's loop has returned in the fork). What a test
says of the imports of a program, or of its memory from the start on, needs a fresh one.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[1]
LIMIT_S = 300

SPENT = [0.0]
"""CPU seconds of the interpreter and of its forks, told with each answer: it ends after the last test."""


def run_script(
    script: str, *arguments: str | Path, after: str = "", limit_s: int = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork, its arguments in `sys.argv`, as `python -c` would, and end it after a time.

    With `after`, in a fork of a fork that has imported this module, and stays for the next such script.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as place:
        shown = [Path(place, name) for name in ("out", "err")]
        argv = ["-c", *map(str, arguments)]
        request = {
            "script": script,
            "argv": argv,
            "shown": list(map(str, shown)),
            "after": after,
            "limit_s": limit_s,
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code, SPENT[0] = json.loads(server.stdout.readline())
        out, err = (path.read_text() for path in shown)
    return subprocess.CompletedProcess(argv, code, out, err)


def run_module(name: str, *arguments: str | Path, limit_s: int = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run a module in a fork, as `python -m` would."""
    script = f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return run_script(script, *arguments, limit_s=limit_s)


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forks"],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # at the end of its input it ends
    return process


def _next_script(requests: Iterable[str], answers: IO[str]) -> dict[str, Any] | None:
    """Answer requests until there are no more, then return None; in a fork, return what it shall run."""
    others: dict[str, tuple[IO[str], IO[str]]] = {}
    spent_s: dict[str, float] = {}
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        module = request.pop("after")
        if not module:
            child = os.fork()
            if child == 0:
                signal.alarm(request["limit_s"])
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for number, path in zip((1, 2), request["shown"], strict=True):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
                return request
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            if module not in others:
                (asked, ask), (told, tell) = os.pipe(), os.pipe()
                if os.fork() == 0:
                    os.close(ask)  # or it would never see the end of what is asked
                    import_module(module)
                    gc.freeze()
                    return _next_script(os.fdopen(asked), os.fdopen(tell, "w", buffering=1))
                os.close(asked)
                os.close(tell)
                others[module] = os.fdopen(ask, "w", buffering=1), os.fdopen(told)
            ask_it, hear_it = others[module]
            ask_it.write(json.dumps({**request, "after": ""}) + "\n")
            code, spent_s[module] = json.loads(hear_it.readline())
        answers.write(json.dumps([code, sum(os.times()[:4]) + sum(spent_s.values())]) + "\n")
    return None


def _import_all() -> None:
    import datasets  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import tests.families  # noqa: F401

    with suppress(ImportError):
        import_module("peft")  # every run looks whether its model is peft's
    torch.set_num_threads(1)
    import_module("tests.prepared")


if __name__ == "__main__":
    _import_all()
    wanted = _next_script(sys.stdin, os.fdopen(os.dup(1), "w", buffering=1))
    if wanted is not None:
        sys.argv = wanted["argv"]
        exec(compile(wanted["script"], "<string>", "exec"), {"__name__": "__main__"})
