"""Runs the steps of a table in processes of their own, each under its own limit, and keeps what they found.

A step that fails, runs out of time or hangs does not stop the next. Each writes `<step>.json` as it goes
(`Record`). Where every thread was when its time was over, or when it crashed, is in `<step>.stack` and in its
result. Python runs a signal's handler between two of its own instructions, so a call that never returns is
ended by a watchdog `HANG_S` after the limit, and its process with it; one that not even that ends, by the
parent.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import ROOT, Record, TimeLimitError, UnavailableError, limited, use_device, write_json
from megatrain.hardware.environment import set_for_runs

HANG_S = 10.0
"""A step that goes on so long after its limit hangs where no signal reaches it: its process is ended."""
GRACE_S = 6.0
"""A process may go on so long after the time for all."""
LEAST_S = 5.0
"""With less time than this no step is begun."""
DRY_FACTOR = 10
"""A machine that tests the scripts may be busy with other tests."""
_SHOWN = 6000
"""Characters of a stack that a result keeps."""


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the table."""

    group: str
    limit_s: float
    expected_s: float
    """On an H200, from the FLOPs and bytes of the step: no measurement."""
    function: str
    """`module:function`; those named `cell_...` get the process's session, others whether the run is dry."""
    process: str = ""
    """Steps of one such name that follow each other share a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """A table of steps, and how its processes are started."""

    module: str
    """What is run with `python -m`; it calls `run_here` for `--child STEPS --out DIR --seconds N`."""
    steps: Mapping[str, Step]
    out: Path
    is_dry: bool = False
    """Tiny shapes, one process for all steps, and `DRY_FACTOR` times their limits."""
    device: str | None = None
    """As in `use_device`; None: CUDA, or the CPU if the run is dry."""
    collect: Callable[[Path], None] = lambda out: None
    """Called after every step, to make one file of all."""

    # -- from outside --------------------------------------------------------------------------------------

    def run_all(self, names: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
        """Run steps in processes, and return what each of them wrote."""
        stop = time.monotonic() + seconds
        expected = sum(self.steps[name].expected_s for name in names)
        print(f"{len(names)} steps, about {expected:.0f} s on an H200; {seconds:.0f} s are given", flush=True)
        for name, suffix in itertools.product(names, ("json", "stack")):
            (self.out / f"{name}.{suffix}").unlink(missing_ok=True)
        for together in in_processes(names, self.steps, is_dry=self.is_dry):
            left = together
            while left:
                if stop - time.monotonic() < LEAST_S:
                    for name in left:
                        settle(self.out, name, "skipped: no time left")
                    break
                status = self._run_apart(left, stop - time.monotonic())
                left = unfinished(self.out, left, status)
        self.collect(self.out)
        return {name: read_step(self.out, name) for name in names}

    def _run_apart(self, names: Sequence[str], seconds: float) -> str:
        """Run steps in one process, and say how it ended."""
        command = [sys.executable, "-m", self.module, "--child", ",".join(names)]
        command += ["--out", str(self.out.resolve()), "--seconds", str(seconds)]
        command += ["--dry-run"] if self.is_dry else []
        command += [] if self.device is None else ["--device", self.device]
        longest_s = min(seconds, sum(self._limit_s(name) + HANG_S for name in names)) + GRACE_S
        process = subprocess.Popen(
            command, cwd=ROOT, env=self._environment(names), start_new_session=True, text=True
        )
        try:
            return f"failed: the process ended with {process.wait(longest_s)}"
        except subprocess.TimeoutExpired:
            return "stopped: no time left" if longest_s > seconds else "stopped: its process did not end"
        finally:
            with suppress(ProcessLookupError):  # and with it what it has started, such as compilers
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process that hangs in its driver outlives even that
                process.wait(GRACE_S)

    def _limit_s(self, name: str) -> float:
        return self.steps[name].limit_s * (DRY_FACTOR if self.is_dry else 1)

    def _environment(self, names: Sequence[str]) -> dict[str, str]:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        if self.is_dry:  # tiny shapes on a busy machine: threads would only wait for each other
            environment["OMP_NUM_THREADS"] = "1"
        if self.steps[names[0]].group == "correctness":
            # cuBLAS is deterministic only with a workspace of this form; it is read when the library starts.
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        elif not self.is_dry:
            environment.pop("OMP_NUM_THREADS", None)  # rivals use torch's threads
        set_for_runs(environment)
        return environment

    # -- inside a process ----------------------------------------------------------------------------------

    def run_here(self, names: Sequence[str], seconds: float) -> None:
        """Run steps in this process, one after the other."""
        from benchmarks.gpu.engine import Session

        stop = time.monotonic() + seconds
        if self.device is not None:
            use_device(self.device)
        session = Session(self.out, self.is_dry)
        for name in names:
            limit = min(self._limit_s(name), stop - time.monotonic())
            if limit < LEAST_S:
                settle(self.out, name, "skipped: no time left")
                continue
            is_usable = self._run_step(name, session, limit)
            self.collect(self.out)
            if not is_usable:
                sys.exit(3)

    def _run_step(self, name: str, session: Any, limit: float) -> bool:
        """Run one step within its limit; returns whether the process is fit for another."""
        record = Record(self.out / f"{name}.json")
        record.add(is_dry=self.is_dry)
        started = time.monotonic()
        is_usable = True
        with (self.out / f"{name}.stack").open("w") as stack:
            faulthandler.enable(stack)
            faulthandler.dump_traceback_later(limit + HANG_S, exit=True, file=stack)
            try:
                module, function = self.steps[name].function.split(":")
                run = getattr(importlib.import_module(module), function)
                with limited(limit, stack) as until:
                    session.until = until - min(15.0, limit / 8)  # for detaching
                    run(record, session if function.startswith("cell_") else self.is_dry)
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
                faulthandler.disable()
        record.add(status=status, seconds=time.monotonic() - started, **stack_of(self.out, name))
        print(f"== {name}: {status} after {record.values['seconds']:.0f} s", flush=True)
        return is_usable


def in_processes(names: Sequence[str], steps: Mapping[str, Step], *, is_dry: bool) -> Iterator[list[str]]:
    """Group steps that follow each other and share a process; a dry run has one process for all."""
    key: Callable[[str], str] = lambda name: "" if is_dry else steps[name].process or name  # noqa: E731
    for _, together in itertools.groupby(names, key):
        yield list(together)


def unfinished(out: Path, names: Sequence[str], status: str) -> list[str]:
    """Give the step in which a process ended its status, and return those that were not begun."""
    for number, name in enumerate(names):
        if read_step(out, name)["status"] in ("running", "not run"):
            if stack_of(out, name).get("stack", "").startswith("Timeout"):  # the watchdog's first word
                status = "hung: it went on after its limit, so its process was ended"
            settle(out, name, status)
            return list(names[number + 1 :])
    return []


def settle(out: Path, name: str, status: str) -> None:
    """Write a step's status for it."""
    result = {**read_step(out, name), "status": status, **stack_of(out, name)}
    write_json(out / f"{name}.json", result)
    print(f"== {name}: {status}", flush=True)


def stack_of(out: Path, name: str) -> dict[str, str]:
    """Return what a step left of its threads' stacks, if it did; an empty file is removed."""
    path = out / f"{name}.stack"
    text = path.read_text() if path.exists() else ""
    if not text:
        path.unlink(missing_ok=True)
    return {"stack": text[:_SHOWN]} if text else {}


def read_step(out: Path, name: str) -> dict[str, Any]:
    """Return what a step has written."""
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"status": "not run"}
