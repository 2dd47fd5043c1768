"""megatrain, resident torch, FSDP2 and DeepSpeed ZeRO-3 on the CPU, side by side in one run.

    python -m benchmarks.rivals.cpu [--quick] [--rounds N] [--precision bf16] [--deepspeed-python PYTHON]

Each side is a process of its own, alive for the whole run (`cpu_worker.py`). They take turns step by
step: one trains while the others wait in a read of a pipe, so that a busy machine disturbs all alike. A ratio
is the median over the rounds of the ratio of tokens/s within a round.

- `streamed_over_resident_8_micro_batches`: the rival is torch with all state in one memory, fused AdamW, and
  transformers' gradient checkpointing. Its losses must equal the streamed ones bit for bit in fp32. The key
  names the number of micro-batches of the run.
- `streamed_over_fsdp2`: `fully_shard` with `CPUOffloadPolicy` on a mesh of one CPU.
- `streamed_over_deepspeed`: ZeRO-3 with parameters and optimizer offloaded to the CPU. Null if DeepSpeed does
  not run; `details.deepspeed.reason` says why.

All sides have the same weights, micro-batches, threads, AdamW, attention (sdpa), clipping to norm 1.0, and
checkpoint every layer. Their losses must agree within 1e-2 in every step, their norms be above 0, and the
losses fall. Norms differ by rounding: torch adds up squares in fp32, megatrain in fp64. Clipping would carry
that into the weights, so the resident side does all of `clip_grad_norm_`'s work, and then clips by the norm
that the streamed side found in the same step.

On a CPU the memory that is offloaded to and the memory that is computed in are one, so that copies between
them are as fast as they can be, and a rival may leave them out: FSDP2 and DeepSpeed move parameters only in
order to gather them. At this size DeepSpeed's published settings keep all parameters gathered from a
micro-batch's forward to the end of its backward.

DeepSpeed compiles its AdamW on first use (a minute or two); `--deepspeed-python` names the interpreter of an
environment that has it, with the same torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.report import emit, hardware, spread
from benchmarks.rivals.cpu_worker import HYPER, MAX_GRAD_NORM, SIDES, Setting

QUICK = Setting(
    hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, vocab_size=512, rows=1, seq_len=32
)
RIVALS = ("fsdp2", "deepspeed")
"""Sides that may be missing: the run then says why."""
LOSS_TOLERANCE = 1e-2
NORM_TOLERANCE = 5e-3
"""Relative, between the norms of a side and the resident one: torch's own have been off by 4e-4."""
WARM_UP = 2
MIN_ROUNDS = 3
START_SECONDS = 400.0
STEP_SECONDS = 300.0


class SideError(Exception):
    """A side does not run."""


class Side:
    """A worker process."""

    def __init__(self, name: str, python: str, setting: Setting) -> None:
        """Start it; `wait_until_ready` comes next."""
        self.name = name
        self.about: dict[str, Any] = {}
        self.steps: list[dict[str, float]] = []
        script = Path(__file__).with_name("cpu_worker.py")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(setting.threads),
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # its own ninja
            "TOKENIZERS_PARALLELISM": "false",
        }
        try:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", str(script), name, json.dumps(asdict(setting))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise SideError(f"{python} does not start: {error.strerror}") from error

    def wait_until_ready(self) -> None:
        """Wait until model, optimizer and batches are there.

        Raises:
            SideError: It does not run, with its reason.
        """
        self.about = self._read(START_SECONDS)

    def step(self, clip_by: float | None = None) -> dict[str, float]:
        """Let it train one step, and return its seconds, loss and norm."""
        found = self._ask({"do": "step", "clip_by": clip_by})
        self.steps.append(found)
        return found

    def peak(self) -> int:
        """Return the most host memory since the last call, or since its start."""
        return int(self._ask({"do": "peak"})["peak_rss_bytes"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise SideError("its process has ended; its error is above") from error
        return self._read(STEP_SECONDS)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise SideError(f"no answer for {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"its process ended with {self._process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(answer["error"])
        return answer


def main() -> None:
    from megatrain.optim.pool import worker_threads

    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds (default: 10)")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no further round after this time")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step (default: 8)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, help="bind every side to so many CPUs (default: all cores)")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"of {','.join(SIDES)}")
    parser.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument(
        "--quick", action="store_true", help="tiny model: checks the script, measures nothing"
    )
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    wanted = arguments.sides.split(",")
    if not {"streamed", "resident"} <= set(wanted) <= set(SIDES):
        parser.error(f"--sides is {arguments.sides}; of {','.join(SIDES)}, the first two always")
    if arguments.quick:
        arguments.rounds = MIN_ROUNDS
    setting = replace(
        QUICK if arguments.quick else Setting(),
        micro_batches=arguments.micro_batches,
        precision=arguments.precision,
        threads=arguments.threads or (1 if arguments.quick else worker_threads()),
        is_bound=arguments.threads is not None,
    )
    began = time.perf_counter()
    sides, reasons = start(wanted, setting, arguments.deepspeed_python)
    try:
        found = compare(sides, reasons, setting, arguments.rounds, arguments.seconds)
    finally:
        for side in sides.values():
            side.close()
    config = {
        **asdict(setting),
        **HYPER,
        "max_grad_norm": MAX_GRAD_NORM,
        "quick": arguments.quick,
        "warm_up_steps": WARM_UP,
        "tokens_per_step": setting.tokens,
    }
    result = {
        "benchmark": "cpu_rivals",
        **found,
        "config": config,
        "hardware": hardware(),
        "seconds": time.perf_counter() - began,
    }
    emit(result, arguments.out)


def start(
    wanted: list[str], setting: Setting, deepspeed_python: str
) -> tuple[dict[str, Side], dict[str, str]]:
    """Start the processes, all at once; returns those that run, and why the others do not."""
    sides: dict[str, Side] = {}
    reasons = {name: "left out by --sides" for name in SIDES if name not in wanted}
    for name in SIDES:
        if name in wanted:
            try:
                sides[name] = Side(name, deepspeed_python if name == "deepspeed" else sys.executable, setting)
            except SideError as error:
                reasons[name] = str(error)
    for name, side in list(sides.items()):
        try:
            side.wait_until_ready()
            if side.about["torch"] != sides["streamed"].about["torch"]:
                raise SideError(f"torch is {side.about['torch']}, not {sides['streamed'].about['torch']}")
        except SideError as error:
            side.close()
            if name not in RIVALS:
                raise
            reasons[name] = str(error)
            del sides[name]
    for name, reason in reasons.items():
        print(f"{name} does not run here: {reason}", flush=True)
    return sides, reasons


def compare(
    sides: dict[str, Side], reasons: dict[str, str], setting: Setting, rounds: int, seconds: float
) -> dict[str, Any]:
    """Let the sides take turns, and return ratios and what each side did."""
    peaks: dict[str, int] = {}
    stop = math.inf
    number = -WARM_UP
    while number < rounds and (number < MIN_ROUNDS or time.perf_counter() < stop):
        if number == 0:
            peaks = {name: side.peak() for name, side in sides.items()}
            stop = time.perf_counter() + seconds
        take_turns(sides, reasons, number)
        show(sides, number)
        check(sides, reasons, setting)
        number += 1
    losses = [step["loss"] for step in sides["streamed"].steps]
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    details: dict[str, Any] = {name: {"reason": reason} for name, reason in reasons.items()}
    for name, side in sides.items():
        times = [step["seconds"] for step in side.steps[WARM_UP:]]
        details[name] = {
            **side.about,
            "seconds": spread(times),
            "tokens_per_s": setting.tokens / statistics.median(times),
            "peak_rss_bytes": side.peak(),
            "peak_rss_bytes_until_warm": peaks[name],
            "losses": [step["loss"] for step in side.steps],
            "grad_norms": [step["grad_norm"] for step in side.steps],
        }
    keys = {
        "resident": f"streamed_over_resident_{setting.micro_batches}_micro_batches",
        "fsdp2": "streamed_over_fsdp2",
        "deepspeed": "streamed_over_deepspeed",
    }
    mine = [step["seconds"] for step in sides["streamed"].steps[WARM_UP:]]
    ratios: dict[str, float | None] = {}
    for name, key in keys.items():
        ratios[key] = None
        if name in sides:
            theirs = [step["seconds"] for step in sides[name].steps[WARM_UP:]]
            details[name]["ratios"] = spread([a / b for a, b in zip(theirs, mine, strict=True)])
            ratios[key] = details[name]["ratios"]["median"]
            print(f"{key}: {ratios[key]:.3f} {details[name]['ratios']}", flush=True)
    return {**ratios, "rounds": number, "details": details}


def take_turns(sides: dict[str, Side], reasons: dict[str, str], number: int) -> None:
    """Let each side train one step; who begins changes, and the resident side follows the streamed one."""
    turns = [["streamed", "resident"], *([name] for name in RIVALS if name in sides)]
    first = number % len(turns)
    streamed: dict[str, float] = {}
    for name in [name for turn in turns[first:] + turns[:first] for name in turn]:
        try:
            if name == "streamed":
                streamed = sides[name].step()
            else:
                sides[name].step(streamed["grad_norm"] if name == "resident" else None)
        except SideError as error:
            if name not in RIVALS:
                raise
            drop(sides, reasons, name, f"step {len(sides[name].steps)}: {error}")


def show(sides: dict[str, Side], number: int) -> None:
    """Print one round for a reader."""
    steps = {name: side.steps[-1] for name, side in sides.items()}
    cells = [f"{name} {step['seconds']:.3f} s, loss {step['loss']:.6f}" for name, step in steps.items()]
    print(f"{'warm-up' if number < 0 else f'round {number + 1}'}: {'; '.join(cells)}", flush=True)


def check(sides: dict[str, Side], reasons: dict[str, str], setting: Setting) -> None:
    """Check that all sides trained the same step; a rival that did not is dropped."""
    mine, theirs = sides["streamed"].steps[-1], sides["resident"].steps[-1]
    if setting.precision == "fp32":
        assert mine["loss"] == theirs["loss"], f"step {len(sides['streamed'].steps)}: {mine}, {theirs}"
    tolerance = NORM_TOLERANCE if setting.precision == "fp32" else LOSS_TOLERANCE
    for name, side in list(sides.items()):
        found, norm = side.steps[-1], theirs["grad_norm"]
        problem = ""
        if not abs(found["loss"] - theirs["loss"]) <= LOSS_TOLERANCE:
            problem = f"its loss is {found['loss']}, the resident one {theirs['loss']}"
        elif not (found["grad_norm"] > 0 and abs(found["grad_norm"] - norm) <= tolerance * norm):
            problem = f"its gradient norm is {found['grad_norm']}, the resident one {norm}"
        elif side.about["threads"] != setting.threads:
            problem = f"it uses {side.about['threads']} threads, not {setting.threads}"
        if problem:
            assert name in RIVALS, f"{name}: {problem}"
            drop(sides, reasons, name, f"step {len(side.steps)}: {problem}")


def drop(sides: dict[str, Side], reasons: dict[str, str], name: str, reason: str) -> None:
    """Go on without a rival."""
    print(f"{name} is left out: {reason}", flush=True)
    reasons[name] = reason
    sides.pop(name).close()


if __name__ == "__main__":
    main()
