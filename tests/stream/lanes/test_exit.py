"""A program that just ends: updates in the background are finished, and its exit code is its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
said = []
atexit.register(lambda: print(said[0]()))  # before megatrain's own, so it is called after
import hashlib, torch, megatrain
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.lanes.test_exit import slow
device, ending = sys.argv[1:]
engine = attach_plainly(make_model(FAMILIES["llama"]()), device=slow() if device == "emulated" else device)
optimizer = engine.adamw(lr=1e-2, max_grad_norm=None)
planes = [state.working for state in engine.host.blocks]
said.append(lambda: hashlib.sha256(b"".join(plane.numpy().tobytes() for plane in planes)).hexdigest())
for step in range(2):
    engine.forward_backward(make_batches(1, seed=step))
    optimizer.step()
if ending == "sync":
    engine.sync()
elif ending == "exit":
    raise SystemExit(3)
elif ending == "error":
    raise ValueError("of the script")
"""


def slow() -> object:
    """Make lanes on which the updates of a step take a second."""
    from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine

    return EmulatedLanes(EmulatedMachine(host_bytes_per_s=2e6))


def run(device: str, ending: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, device, ending],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def weights() -> str:
    """What the weights are after both steps, as a digest."""
    code, said, errors = run("cpu", "sync")
    assert code == 0, errors
    return said


@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("exit", 3), ("error", 1)])
def test_a_program_that_ends_finishes_its_updates(ending: str, code: int, weights: str) -> None:
    found = run("emulated", ending)
    assert found[:2] == (code, weights), found[2]
    assert ("ValueError: of the script" in found[2]) == (ending == "error")
