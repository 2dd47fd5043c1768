"""How long ranks take to end when one of them is killed, stopped or hangs: in a step, a save, an evaluation.

    python -m benchmarks.distributed.lost_ranks [--timeout 5] [--ranks 2] [--only WORD] [--out FILE]

Real processes train a tiny model on Gloo, with `parallel.timeout` as given, and meet in a store that outlives
them, as torchrun's does. When a rank comes to the moment of a case it says so and goes on slowly; then the
rank of the case gets its signal, or waits for ever by itself. From then on the time of every other one's end
is taken. It has to be within the timeout and 10 seconds, with exit code 7, and one sentence that names the
rank.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.report import emit, hardware
from megatrain.errors import MegatrainError, RankError
from tests.train.project import make_config

GRACE_S = 10.0
_SLOWLY_S = 120.0
_STEP = 3


@dataclass(frozen=True, slots=True)
class Case:
    """What happens to which rank, and when."""

    moment: str
    """`step`, `save` or `evaluation`."""
    how: str
    """A signal, or `hang`."""
    victim: int
    comes: int
    """The rank that comes to the moment: only the first one saves."""


CASES = [
    *(Case("step", how, rank, rank) for how in ("SIGKILL", "SIGSTOP", "hang") for rank in (1, 0)),
    *(Case("save", how, 0, 0) for how in ("hang", "SIGKILL", "SIGSTOP")),
    *(Case("save", how, 1, 0) for how in ("SIGKILL", "SIGSTOP")),
    *(Case("evaluation", how, 1, 1) for how in ("SIGKILL", "SIGSTOP", "hang")),
    Case("evaluation", "hang", 0, 0),
]


def main() -> None:
    """Go through all cases, and say which are too slow."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--timeout", type=float, default=5.0, help="parallel.timeout")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    import megatrain.train.loop  # noqa: F401, before the processes part: once for all

    rows = []
    for case in CASES:
        name = f"{case.moment} {case.how} rank {case.victim}"
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as place:
            found = run(case, Path(place), arguments.ranks, arguments.timeout)
        rows.append({**asdict(case), **found})
        verdict = "ok" if found["is_as_promised"] else "NOT AS PROMISED"
        seconds = ", ".join(f"{each:.1f}" for each in found["ended_after_s"])
        print(f"{name}: others ended after {seconds} s with {found['codes']}: {verdict}", flush=True)
        print(f"    {found['sentence']}", flush=True)
    result = {
        "hardware": hardware(),
        "timeout_s": arguments.timeout,
        "ranks": arguments.ranks,
        "longest_s": max(max(row["ended_after_s"]) for row in rows),
        "are_as_promised": all(row["is_as_promised"] for row in rows),
        "cases": rows,
    }
    emit(result, arguments.out)


def run(case: Case, place: Path, size: int, timeout_s: float) -> dict[str, Any]:
    """Train, let the case happen, and return how the others ended."""
    import torch.distributed as dist

    # as torchrun's: it lives in a process that is no rank
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    make_config(place)
    sys.stdout.flush()
    processes = []
    for rank in range(size):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                code = _rank(rank, size, store.port, place, case, timeout_s)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        processes.append(process)
    try:
        while not (place / "moment").exists():
            if os.waitpid(-1, os.WNOHANG)[0]:
                raise SystemExit(f"a rank ended before its time: {(place / 'errors').read_text()}")
            time.sleep(0.02)
        if case.how != "hang":
            os.kill(processes[case.victim], signal.Signals[case.how])
        began_s = time.monotonic()
        ends = _wait([p for rank, p in enumerate(processes) if rank != case.victim or case.how == "hang"])
    finally:
        for process in processes:
            _end(process)
    errors = (place / "errors").read_text()
    sentences = re.findall(r"rank \d+ \(process \d+ on [^)]*\)[^\n]*", errors)
    others = [process for rank, process in enumerate(processes) if rank != case.victim]
    seconds = [round(ends[process][0] - began_s, 3) for process in others]
    codes = [ends[process][1] for process in others]
    return {
        "ended_after_s": seconds,
        "codes": codes,
        "sentence": re.sub(r" on [^)]*\)", ")", sentences[0]) if sentences else errors[-500:],
        "is_as_promised": (
            max(seconds) <= timeout_s + GRACE_S
            and set(codes) == {RankError.exit_code}
            and len(sentences) == 1
            and sentences[0].startswith(f"rank {case.victim} ")
        ),
    }


def _wait(processes: list[int]) -> dict[int, tuple[float, int]]:
    """Wait for processes, and return when each has ended with which code."""
    ends: dict[int, tuple[float, int]] = {}
    while len(ends) < len(processes):
        for process in processes:
            if process not in ends:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    ends[process] = time.monotonic(), os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return ends


def _end(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):  # it has ended, and was waited for
        pass


def _rank(rank: int, size: int, port: int, place: Path, case: Case, timeout_s: float) -> int:
    """Train as one rank, up to the moment and beyond; return the exit code."""
    import torch
    import torch.distributed as dist

    from megatrain.cli.log import log_to_stderr
    from megatrain.distributed.ranks import Ranks
    from megatrain.train.loop import train

    errors = os.open(place / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    log_to_stderr()
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    config = make_config(
        place,
        train={"steps": 6, "grad_accumulation": 2 * size},
        parallel={"shards": size},
        data={"val_size": 0.02},
        eval={"every": _STEP},
        checkpoint={"every": _STEP},
        log={"report": False},
    )
    comes = rank == case.comes
    try:
        with Ranks(store, timeout_s) as ranks, patch("megatrain.train.run.plan_memory", return_value=None):
            place_of = {
                "step": "megatrain.stream.ranks.shared_gradients.SharedGradients.exchange",
                "save": "megatrain.train.run.write_state",
                "evaluation": "megatrain.train.evaluate.evaluator.evaluate",
            }[case.moment]
            number = 3 * 2 if case.moment == "step" else 1
            with patch(place_of, _at(place_of, number if comes else -1, case, place)):
                train(config, ranks=ranks)
    except MegatrainError as error:
        if not error.is_told:
            print(f"error: {error}", flush=True)
        return error.exit_code
    return 0


def _at(name: str, number: int, case: Case, place: Path) -> Callable[..., Any]:
    """Return a function of the package that says when it is called for the nth time, and goes on slowly."""
    from pkgutil import resolve_name

    call = resolve_name(name)
    calls = 0

    def called(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            (place / "moment").touch()
            if case.how == "hang":
                threading.Event().wait()
            until_s = time.monotonic() + _SLOWLY_S
            while time.monotonic() < until_s:
                time.sleep(0.05)
        return call(*arguments, **options)

    return called


if __name__ == "__main__":
    main()
