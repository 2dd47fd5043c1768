"""A run whose update fails: one sentence, nothing torn on the disk, and the same bits after all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain import cli
from megatrain.store.drives import system as calls
from megatrain.store.drives.record import read_record
from megatrain.train.loop import train
from tests.products import every_value
from tests.store.disks import Counted
from tests.stream.execute.test_integrity import FailingKernel
from tests.train.project import make_config
from tests.train.test_loop import assert_same_runs

NUM_UPDATES = 6
"""Of a step: the kernel is called once for each block."""


def sections(root: Path, device: str, updates: str, *, on_drives: bool = False) -> dict[str, Any]:
    """Return settings of a run of 6 steps."""
    immediate = updates == "immediate"
    ram = 540_000 if device == "emulated" else 1_100_000  # on a CPU, what computes is in it too
    tiers = {"tiers": {"ram": ram, "nvme": [str(root / "drive")]}} if on_drives else {}
    return {
        "train": {"steps": 6, "device": device, "precision": "bf16"},
        "optim": {"updates": updates, "max_grad_norm": None if immediate else 1.0},
        "checkpoint": {"every": None if on_drives else 2},
        "memory": {"activations": "recompute", "fragments": False, **tiers},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Uninterrupted runs, with clipping and without."""
    found = {}
    for clips in (False, True):
        root = tmp_path_factory.mktemp("whole")
        with pytest.MonkeyPatch.context() as patch:
            kernel = FailingKernel(patch)
            train(make_config(root, **sections(root, "cpu", "deferred" if clips else "immediate")))
            assert kernel.num_calls == 6 * NUM_UPDATES
        found[clips] = root / "run"
    return found


def start_command(root: Path, config: Any) -> int:
    """Run `megatrain train` with a configuration, and return its exit code."""
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        with pytest.raises(SystemExit) as end:
            cli.main(["train", str(file)])
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.sampled(3)
@every_value(
    device=["cpu", "emulated"],
    updates=["deferred", "serial", "immediate"],
    number=[0, NUM_UPDATES - 1, NUM_UPDATES // 2],
    on_drives=[True, False],
)
def test_a_run_whose_update_fails_goes_on_to_the_same_bits(
    device: str,
    updates: str,
    number: int,
    on_drives: bool,
    whole: dict[bool, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The update fails in the fourth step: after a checkpoint of the second, or a commit of the third."""
    monkeypatch.setattr(calls, "system", Counted())
    config = make_config(tmp_path, **sections(tmp_path, device, updates, on_drives=on_drives))
    with monkeypatch.context() as patch:
        kernel = FailingKernel(patch)
        kernel.fails_at = 3 * NUM_UPDATES + number
        assert start_command(tmp_path, config) == 6
    said = capsys.readouterr().err
    checkpoints = tmp_path / "run/checkpoints"
    place = "step 3, which is committed on the drives" if on_drives else f"{checkpoints}/step-00000002"
    assert said.splitlines()[-1] == (
        "error: OSError: [Errno 5] the drive is gone; so an update ended in the middle, and its state is "
        "lost; nothing of it was saved. Start the same command again, with checkpoint.resume=auto: it goes "
        f"on from {place}"
    )
    assert "Traceback" not in said
    assert [path.name for path in checkpoints.glob("*")] == ([] if on_drives else ["step-00000002"])
    assert not list((tmp_path / "run").glob("*hf*"))
    if on_drives:
        record = read_record(tmp_path / "drive")
        assert record is not None
        assert record.step == 3
    assert start_command(tmp_path, config) == 0
    assert_same_runs(tmp_path / "run", whole[updates != "immediate"])


def test_a_run_that_fails_before_its_first_checkpoint_begins_anew(
    whole: dict[bool, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path, **sections(tmp_path, "emulated", "deferred"))
    with monkeypatch.context() as patch:
        FailingKernel(patch).fails_at = 2
        assert start_command(tmp_path, config) == 6
    assert "it goes on from the beginning, since nothing was saved before" in capsys.readouterr().err
    assert start_command(tmp_path, config) == 0
    assert_same_runs(tmp_path / "run", whole[True])
