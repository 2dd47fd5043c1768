"""Trains one run through many kill -9s: `python -m tests.train.killed_run ROOT NUM_KILLS SEED STEPS`.

Everything is imported once; each attempt is a fork, so that a kill costs no start-up.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from megatrain.train.loop import train
from tests.train.project import make_config


def attempt(root: Path, out: str, steps: int) -> int:
    """Run the training in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        train(make_config(root, out, train={"steps": steps}, checkpoint={"every": 5}))
        code = 0
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """Wait for a child and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(root: Path, num_kills: int, seed: int, steps: int) -> None:
    """Train `whole` once and `killed` through `num_kills` kills at random times."""
    started = time.monotonic()
    if wait(attempt(root, "whole", steps)):
        sys.exit("the uninterrupted run failed")
    duration = time.monotonic() - started
    chance = random.Random(seed)
    kills = 0
    while kills < num_kills:
        child = attempt(root, "killed", steps)
        time.sleep(chance.uniform(0.02, max(0.2, 1.5 * duration / num_kills)))
        os.kill(child, signal.SIGKILL)
        status = wait(child)
        if status == 0:  # it was done before the kill: begin again somewhere else in the run
            os.rename(root / "killed/hf", root / f"finished-{kills}")
        elif status != -signal.SIGKILL:
            sys.exit(f"attempt {kills} failed by itself with {status}")
        kills += 1
    if wait(attempt(root, "killed", steps)):
        sys.exit("the last attempt failed")
    print(f"{kills} kills in {steps} steps, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
