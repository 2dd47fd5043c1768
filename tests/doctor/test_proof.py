"""A machine that computes right is proved so, and one that does not is named with its cell."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import doctor
from megatrain.cli import main
from megatrain.cli.commands import PROOF
from megatrain.doctor import proof as module
from megatrain.doctor.checks import Level
from megatrain.doctor.examine import Report, examine
from megatrain.doctor.machine_spec import machine_of
from megatrain.doctor.proof import CELLS, TINY, prove
from megatrain.errors import OutputError
from megatrain.hardware.spec import HardwareSpec
from tests.doctor import test_bench

CPU = torch.device("cpu")
SHAPE = replace(TINY, num_steps=2)


@pytest.fixture(scope="module")
def machine() -> HardwareSpec:
    return machine_of(test_bench.run_bench(CPU, None, test_bench.TINY), None)


def test_every_cell_has_the_bits_of_the_resident_model_and_a_step_its_plan(machine: HardwareSpec) -> None:
    proof = prove(CPU, machine, shape=SHAPE)
    same, step = proof.checks
    assert (same.name, same.level) == ("same results", Level.OK)
    assert same.text.startswith("6 ways to train")
    assert proof.cells.keys() == CELLS.keys()
    for precision in ("fp32", "bf16"):
        cells = [found for name, found in proof.cells.items() if CELLS[name]["precision"] == precision]
        assert len(cells) == 3
        assert all(found == cells[0] for found in cells)
    assert step.name == "streamed step"
    bound_s = max(proof.step["bounds_s"].values())
    assert bound_s > 0
    assert proof.step["planned_s"] >= bound_s * (1 - 1e-12)  # sums of the same seconds in another order
    assert len(proof.step["steps_s"]) == SHAPE.num_steps + 1
    lanes = {lane for lane, *_ in proof.step["timeline"]}
    assert {"fetch", "compute", "offload"} <= lanes
    assert all(0 <= start <= end for _, _, start, end in proof.step["timeline"])


def test_a_wrong_cell_is_named_with_what_is_wrong(
    machine: HardwareSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of one cell has a flipped bit; another one's updates are not those of the rest."""
    plain = module._streamed

    def faulty(device: torch.device, settings: Any) -> dict[str, str]:
        found = plain(device, settings)
        if settings is CELLS["bf16, one slot"]:
            found["gradients"] = "another"
        if settings is CELLS["fp32, kept"]:
            found["weights"] = "another"
        if settings is CELLS["bf16, half resident"]:
            raise RuntimeError("CUDA error: an illegal memory access\nmore")
        return found

    monkeypatch.setattr(module, "_streamed", faulty)
    check = prove(CPU, machine, shape=SHAPE).checks[0]
    assert check.level is Level.FAIL
    assert check.text == (
        "bf16, half resident: RuntimeError: CUDA error: an illegal memory access; fp32, kept: its weights "
        "are not those of the same training in another way; bf16, one slot: its gradients are not those "
        "of the resident model"
    )


def test_a_bit_that_flips_in_a_slot_is_found(machine: HardwareSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.stream.lanes import InlineLanes

    copy, left = InlineLanes.copy, [40]

    def flip(lanes: InlineLanes, target: torch.Tensor, source: torch.Tensor) -> None:
        copy(lanes, target, source)
        left[0] -= 1
        if left[0] == 0:
            target.view(torch.uint8)[6] ^= 64

    monkeypatch.setattr(InlineLanes, "copy", flip)
    assert prove(CPU, machine, shape=SHAPE).checks[0].level is Level.FAIL


def test_a_step_that_is_slower_than_its_plan_is_a_warning() -> None:
    step = {"step_s": 1.31, "planned_s": 1.0, "bound": "compute", "bounds_s": {"compute": 0.9}}
    check = module._beside_plan(step)
    assert check.level is Level.WARN
    assert check.text == "1.31 s, where the plan says 1 s and its bound, compute, is 0.9 s"
    assert module._beside_plan({**step, "step_s": 1.29}).level is Level.OK


def test_the_command_writes_one_file_and_ends_with_3_where_results_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def quick(path: Path, *, proves: bool, **_: Any) -> Any:
        return examine(path, proves=proves, sizes=test_bench.TINY)

    def tiny(device: torch.device, machine: HardwareSpec, *, progress: Any) -> Any:
        return prove(device, machine, shape=SHAPE)

    monkeypatch.setattr(doctor, "examine", quick)
    monkeypatch.setattr(sys.modules["megatrain.doctor.examine"], "prove", tiny)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--prove", "--path", str(tmp_path)])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert " OK    same results" in said
    assert f"the proof is in {tmp_path / PROOF}" in said
    written = json.loads((tmp_path / PROOF).read_text())
    assert written["proof"]["cells"].keys() == CELLS.keys()
    assert written["bench"]["copies"]["h2d_locked"] > 0
    assert str(tmp_path) not in (tmp_path / PROOF).read_text()
    monkeypatch.setattr(module, "_wrong", lambda cells, expected: iter([("fp32, kept", "it is wrong")]))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--prove", "--path", str(tmp_path)])
    assert ended.value.code == 3


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*no/proof.json: No such file.*--path"):
        Report(checks=()).save(tmp_path / "no/proof.json")
