"""Whole runs on the test device: stopped and killed ones go on to the same bits, dropout and all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.train import loop
from megatrain.train.loop import train
from tests.host_device.device import TYPE, register
from tests.host_device.on_device.train_one import sections
from tests.train.killed_run import num_rows
from tests.train.project import make_config
from tests.train.test_loop import assert_same_runs

host = register()
ROOT = Path(__file__).parents[3]


@pytest.mark.parity
@pytest.mark.parametrize(
    "memory",
    [
        {"activations": "recompute", "lockstep": 2},
        {"activations": "keep", "lockstep": 1},
        {"activations": "offload", "lockstep": 2},
        {"activations": "recompute_cheap", "lockstep": 2, "resident_blocks": 1},
        {"activations": "drop_boundary", "lockstep": 1},
    ],
    ids=str,
)
def test_a_run_that_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]
) -> None:
    """It stops in a step after a checkpoint, and every generator is somewhere else when it goes on."""
    host.native.delay(1, 0.1, 3e-4, 1e-4)
    monkeypatch.setattr("megatrain.stream.meter.measure_matmul_peak", lambda *_: 1e12)
    monkeypatch.setattr("megatrain.stream.machine.measure_matmul_peak", lambda *_: 1e12)
    train(make_config(tmp_path, "whole", **sections(steps=4, memory=memory)))
    step = loop.train_step

    def stop(run: Any) -> Any:
        stats = step(run)
        if run.step == 3:
            raise KeyboardInterrupt
        return stats

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(make_config(tmp_path, "parts", **sections(steps=4, memory=memory)))
    assert [path.name for path in (tmp_path / "parts/checkpoints").iterdir()] == ["step-00000002"]
    torch.manual_seed(77)
    train(make_config(tmp_path, "parts", **sections(steps=4, memory=memory)))
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parity
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """In processes of their own, with kill -9."""

    def begin(out: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.host_device.on_device.train_one", str(tmp_path), out, "30"]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ})

    whole = begin("whole")
    assert whole.wait() == 0
    for rows in (3, 9, 17):
        run = begin("killed")
        while num_rows(tmp_path / "killed") < rows and run.poll() is None:
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    assert begin("killed").wait() == 0
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")


def test_checkpoints_of_before_there_were_other_accelerators_load(caplog: pytest.LogCaptureFixture) -> None:
    """Their states are of CUDA's generators: none of them belongs to this device."""
    states = encode_rng()
    expected = torch.rand(3), torch.rand(3, device=TYPE)
    del states["accelerator"]
    for old in ([], [states["torch"]]):
        torch.manual_seed(5)
        before = host.get_rng_state(0)
        restore_rng({**states, "cuda": old})
        assert torch.equal(torch.rand(3), expected[0])
        assert torch.equal(host.get_rng_state(0), before)
    assert [message for message in caplog.messages if "random states" in message] == [
        "the checkpoint has random states of 1 cuda devices, this machine has 0; from here on, "
        "results are not bitwise"
    ]
