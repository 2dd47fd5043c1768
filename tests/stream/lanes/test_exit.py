"""A program that just ends: updates in the background are finished, and its exit code is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.store.drives.record import read_record
from tests.forks import run_script

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
    """Make lanes on which the updates of a step take a fifth of a second."""
    from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine

    return EmulatedLanes(EmulatedMachine(host_bytes_per_s=1e7))


def run(device: str, ending: str, script: str = SCRIPT) -> tuple[int, str, str]:
    done = run_script(script, device, ending)
    return done.returncode, done.stdout, done.stderr


ON_DRIVES = """
import sys, megatrain
from megatrain.store import on_drives as away, placement
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.lanes.test_exit import slow
drive, ending = sys.argv[1:]
away.place = lambda layouts, tiers, **given: placement.placed(layouts, tiers, 0, 0, **given)
tiers = megatrain.Tiers(nvme=(drive,), ram=1 << 30)
engine = attach_plainly(make_model(FAMILIES["llama"]()), device=slow(), tiers=tiers)
optimizer = engine.adamw(lr=1e-2, max_grad_norm=None)
for step in range(2):
    engine.forward_backward(make_batches(1, seed=step))
    optimizer.step()
    engine.commit(step, {})
if ending == "exit":
    raise SystemExit(3)
elif ending == "error":
    raise ValueError("of the script")
"""


@pytest.fixture(scope="module")
def weights() -> str:
    """What the weights are after both steps, as a digest."""
    code, said, errors = run("cpu", "sync")
    assert code == 0, errors
    return said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ending", "code"), [("end", 0), ("exit", 3), pytest.param("error", 1, marks=pytest.mark.parity)]
)
def test_a_program_that_ends_finishes_its_updates(ending: str, code: int, weights: str) -> None:
    found = run("emulated", ending)
    assert found[:2] == (code, weights), found[2]
    assert ("ValueError: of the script" in found[2]) == (ending == "error")


@pytest.mark.parametrize(
    ("ending", "code"),
    [("error", 1), *(pytest.param(*row, marks=pytest.mark.parity) for row in (("end", 0), ("exit", 3)))],
)
def test_a_program_that_ends_finishes_what_is_on_its_way_to_the_drives(
    ending: str, code: int, tmp_path: Path
) -> None:
    """Python ends the pools of I/O threads before it calls functions of `atexit`."""
    found = run(str(tmp_path), ending, ON_DRIVES)
    assert found[0] == code, found[2]
    assert "in the background" not in found[2]
    record = read_record(tmp_path)
    assert record is not None
    assert record.step == 1


@pytest.mark.parametrize(
    ("ending", "code"),
    [("exit", 3), *(pytest.param(*row, marks=pytest.mark.parity) for row in (("end", 0), ("error", 1)))],
)
def test_an_update_that_fails_at_the_end_is_told_and_the_exit_code_kept(ending: str, code: int) -> None:
    failing = SCRIPT.replace(
        "if ending ==",
        """from megatrain.optim import adamw
def fail(*_): raise OSError("the drive is gone")
adamw.update_many = fail
if ending ==""",
        1,
    )
    found = run("emulated", ending, failing)
    assert found[0] == code, found[2]
    assert (
        "what ran in the background when the program ended has failed: OSError('the drive is gone')"
        in found[2]
    )
