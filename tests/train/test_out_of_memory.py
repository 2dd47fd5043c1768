"""Memory that runs out ends a run in one sentence with the plan beside it, and the state stays whole."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatrain.config.sizes import binary
from megatrain.errors import CapacityError, DataError, as_ours, exhausted_memory, os_errors
from megatrain.hardware import resident_bytes
from megatrain.train import loop, run
from megatrain.train.loop import train
from tests.train import starved_run
from tests.train.project import make_config, write_corpus, write_model_config
from tests.train.test_loop import assert_same_runs


def _fail(error: Exception) -> None:
    raise error


EXHAUSTED: dict[str, tuple[str, Callable[[], object]]] = {
    "python": ("host", lambda: bytearray(1 << 60)),
    "numpy": ("host", lambda: np.empty(1 << 60, np.uint8)),
    "torch": ("host", lambda: torch.empty(1 << 60, dtype=torch.uint8)),
    "system": ("host", lambda: _fail(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))),
    "device": (
        "device",
        lambda: _fail(torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.")),
    ),
    "driver": ("device", lambda: _fail(RuntimeError("CUDA error: out of memory\nCUDA kernel errors ..."))),
}
"""Which memory is used up, and what says so: all that allocates on the host does, really."""


@pytest.mark.parametrize("name", EXHAUSTED)
def test_every_way_in_which_memory_runs_out_is_known(name: str) -> None:
    tier, allocate = EXHAUSTED[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever the library raises
        allocate()
    assert exhausted_memory(caught.value) == tier
    ours = as_ours(caught.value)
    assert isinstance(ours, CapacityError)
    assert str(ours).startswith(f"{tier} memory ran out (")
    said = pytest.raises(CapacityError, match=f"^{tier} memory ran out, trying to read x; close")
    with said, os_errors("read", "x", DataError):
        allocate()


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), OSError(errno.EIO, "x"), ValueError("x")]
)
def test_other_errors_are_not_memory(error: Exception) -> None:
    assert exhausted_memory(error) is None


def binary_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["torch", "numpy", "device"])
def test_a_run_whose_memory_runs_out_says_what_was_planned_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tier, allocate = EXHAUSTED[name]
    steps, planned = loop.train_step, []

    def fails(run: Any) -> Any:
        planned.append(run.planned.plan)
        if run.step == 4:
            run.engine.model.register_forward_hook(lambda *_: allocate())
        return steps(run)

    monkeypatch.setattr(loop, "train_step", fails)
    config = make_config(tmp_path, checkpoint={"every": None}, log={"report": False})
    with pytest.raises(CapacityError) as caught:
        train(config)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert text.startswith(f"{tier} memory ran out in step 5: the plan takes ")
    assert text.endswith(
        f"Close what else takes memory, or have less planned, with memory.{tier}_limit. Step 4 is saved in "
        f"{tmp_path}/run/checkpoints/step-00000004, and the same command goes on from there"
    )
    plan = planned[0]
    if tier == "host":
        assert (
            f"takes {binary(plan.tier_bytes('ram'))} of {binary(plan.limits['ram'])} that it may take" in text
        )
        held = re.search(r"this process holds ([0-9.,]+ [KMG]iB)", text)
        assert held is not None
        assert binary_bytes(held[1]) == pytest.approx(resident_bytes(), rel=0.2)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000004"]
    monkeypatch.undo()
    train(config)
    assert (tmp_path / "run/checkpoints/step-00000012").is_dir()


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state after 6 steps of a run whose layers have megabytes, and whose memory never runs out."""
    root = tmp_path_factory.mktemp("starved")
    train(large_config(root))
    return root / "run"


def large_config(root: Path) -> Any:
    (root / "model").mkdir()
    write_model_config(root / "model", hidden_size=256, intermediate_size=1024)
    write_corpus(root / "corpus.txt")
    return make_config(root, train={"steps": 6}, checkpoint={"every": None}, log={"report": False})


@pytest.mark.parametrize(
    "moment",
    [
        moment if moment == "backward" else pytest.param(moment, marks=pytest.mark.parity)
        for moment in starved_run.MOMENTS
    ],
)
def test_a_process_that_gets_no_more_memory_saves_its_last_whole_step(
    moment: str, starved: Path, tmp_path: Path
) -> None:
    config = large_config(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    ended = subprocess.run(
        [sys.executable, "-m", starved_run.__name__, str(tmp_path / "run.yaml"), moment],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 3, ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("error: host memory ran out in step 5: the plan takes ")
    assert "0 bytes are left (ulimit -v)" in said
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    assert said.endswith(f"Step 4 is saved in {checkpoint}, and the same command goes on from there")
    train(config)
    assert_same_runs(tmp_path / "run", starved)


def test_a_model_that_finds_no_room_is_told_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "make_engine", lambda *_, **__: EXHAUSTED["torch"][1]())
    said = r"^host memory ran out while the model was loaded: the plan takes "
    with pytest.raises(CapacityError, match=said):
        train(make_config(tmp_path, log={"report": False}))
