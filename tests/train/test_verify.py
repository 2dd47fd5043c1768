"""`megatrain verify` finds every flip, names file and chunk, and changes nothing."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.cli import main
from megatrain.store.drives.places import STATE_NAME
from megatrain.store.drives.record import RECORD_NAME, read_record, write_record
from megatrain.store.drives.striped import Extent, StripedStore
from megatrain.train.loop import train
from tests.train.project import make_config, train_until
from tests.train.resume.test_state_commits import sections


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with two checkpoints and its model."""
    root = tmp_path_factory.mktemp("finished")
    return train(make_config(root, train={"steps": 8}))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    """Return the exit code, the lines of standard output, and the error."""
    code: Any = 0
    try:
        main(["verify", str(path)])
    except SystemExit as error:
        code = error.code or 0
    found = capsys.readouterr()
    errors = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code != 0)
    assert "Traceback" not in found.err
    return code, found.out.splitlines(), "".join(errors)


def flip(file: Path, index: int) -> None:
    data = bytearray(file.read_bytes())
    data[index] ^= 1
    file.write_bytes(data)


def test_a_sound_run_has_a_line_for_each_thing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    code, lines, _ = verify(run, capsys)
    assert code == 0
    assert re.fullmatch(r"\S+/step-00000008: whole: step 8, \d+ files, \d\.\d MiB", lines[0])
    assert re.fullmatch(r"\S+/step-00000004: whole: step 4, \d+ files, \d\.\d MiB", lines[1])
    assert lines[2:] == [f"{run / 'hf'}: whole: the model of step 8, byte for byte"]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_every_flip_in_a_run_is_found_and_its_file_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(0)
    parts = [*sorted(run.glob("checkpoints/step-*")), run / "hf"]
    for part in parts:
        files = [path for path in sorted(part.rglob("*")) if path.is_file() and path.stat().st_size]
        for file in files:
            if file.name == "README.md":  # the card is of the run, not of the checkpoint
                continue
            index = chance.randrange(file.stat().st_size)
            flip(file, index)
            code, lines, error = verify(run, capsys)
            assert code == 2
            (wrong,) = [line for line in lines if "damaged" in line]
            assert wrong.startswith(f"{part}: damaged: ")
            assert file.name in wrong
            assert file.name == "MANIFEST.json" or "between bytes 0 and " in wrong
            assert error == f"error: 1 of 3 in {run} cannot be trusted; the first is {part}"
            flip(file, index)
    assert verify(run, capsys)[0] == 0


def test_a_file_that_is_gone_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "hf/config.json").unlink()
    code, lines, _ = verify(run, capsys)
    assert code == 2
    assert "not the model of step 8: config.json is missing" in lines[2]


def test_an_exported_model_of_another_step_is_said_to_have_no_digests(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace("steps: 8", "steps: 80"))
    flip(run / "hf/model.safetensors", (run / "hf/model.safetensors").stat().st_size - 1)
    code, lines, _ = verify(run, capsys)
    assert code == 0
    assert "sound: 1 file with 30 tensors" in lines[2]
    assert "no digests and that it is of none of the checkpoints that are here" in lines[2]


@pytest.mark.parametrize("is_own_name", [True, False])
def test_one_checkpoint(run: Path, capsys: pytest.CaptureFixture[str], is_own_name: bool) -> None:
    path = run / "checkpoints/step-00000004"
    if not is_own_name:
        path = path.rename(run.parent / "copy")
    assert verify(path, capsys)[0] == 0
    flip(path / "model.safetensors", 5000)
    code, lines, _ = verify(path, capsys)
    assert code == 2
    assert re.search(r"damaged: model.safetensors has wrong contents between bytes 0 and \d+$", lines[0])


def test_a_model_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = run / "hf"
    (run / "config.yaml").unlink()
    code, lines, _ = verify(model, capsys)
    assert code == 0
    assert re.search(r"sound: 1 file with 30 tensors, \d+\.\d MiB; headers, sizes and index agree", lines[0])
    tensors = load_file(model / "model.safetensors")
    name = sorted(tensors)[3]
    tensors[name].view(-1)[7] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    code, lines, _ = verify(model, capsys)
    assert code == 2
    assert f"{name} has 1 of {tensors[name].numel():,} values that are not finite" in lines[0]
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1])
    code, lines, _ = verify(model, capsys)
    assert code == 2
    assert "model.safetensors is truncated" in lines[0]


def test_a_model_in_floats_of_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.ones(100).to(torch.float8_e4m3fn)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    assert verify(tmp_path, capsys)[0] == 0
    values.view(torch.uint8)[17] = 0x7F
    save_file({"weight": values}, tmp_path / "model.safetensors")
    code, lines, _ = verify(tmp_path, capsys)
    assert code == 2
    assert "weight has 1 of 100 values that are not finite" in lines[0]


def test_anything_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        code, lines, error = verify(path, capsys)
        assert (code, lines) == (2, [])
        assert "is no run, no checkpoint and no model directory" in error


def test_flips_on_drives_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flip in the committed copy is found and named; one in the other copy is none."""
    train_until(make_config(tmp_path, **sections(tmp_path)), 3)
    run, first = tmp_path / "run", tmp_path / "drive0"
    code, lines, _ = verify(run, capsys)
    assert code == 0
    assert re.fullmatch(rf"{first / RECORD_NAME}: whole: step 3 on 2 drives, \d\.\d MiB", lines[-1])
    record, chance, found = read_record(first), random.Random(0), 0
    assert record is not None
    named = re.compile(rf"{STATE_NAME} is damaged: chunk \d+ of extent \d+ \(bytes (\d+) to (\d+)\)")
    for _ in range(25):
        file = tmp_path / f"drive{chance.randrange(2)}" / STATE_NAME
        index = chance.randrange(file.stat().st_size - 4096)
        flip(file, index)
        code, lines, _ = verify(run, capsys)
        if code:
            found += 1
            place = named.search(lines[-1])
            assert place is not None
            assert f"{file} is damaged" in lines[-1]
            assert int(place[1]) <= index < int(place[2])
        flip(file, index)
    assert 5 <= found <= 20, "about half of the bytes are of the committed copies"
    (tmp_path / "drive1" / STATE_NAME).unlink()
    code, lines, _ = verify(run, capsys)
    assert code == 2
    assert f"{tmp_path / 'drive1' / STATE_NAME}: No such file" in lines[-1]


def test_drives_in_use_or_of_an_earlier_version_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until(make_config(tmp_path, **sections(tmp_path)), 2)
    record = read_record(tmp_path / "drive0")
    assert record is not None
    extents = [Extent("", size) for size in record.extent_bytes]
    store = StripedStore([tmp_path / "drive0", tmp_path / "drive1"], extents, owner=record.owner)
    with store._opening():
        code, lines, _ = verify(tmp_path / "run", capsys)
    store.close()
    assert code == 2
    assert "is in use by a run; verify it when the run has ended" in lines[-1]
    for changes, words in (
        ({"chunk_bytes": 0, "extent_bytes": ()}, "is of an earlier version of megatrain and does not say"),
        ({"sums": record.sums[1:]}, "sizes, copies and checksums do not belong together"),
        ({"copies": "0"}, "sizes, copies and checksums do not belong together"),
        ({"extent_bytes": (7, *record.extent_bytes[1:])}, "sizes, copies and checksums do not belong"),
        ({"drives": record.drives[:1]}, "names 1 directories, and memory.tiers.nvme 2"),
        ({"drives": record.drives[::-1]}, "is not the file that"),
    ):
        write_record(tmp_path / "drive0", replace(record, **changes))
        code, lines, _ = verify(tmp_path / "run", capsys)
        assert code == 2
        assert words in lines[-1]
    write_record(tmp_path / "drive0", replace(record, owner="another"))
    code, lines, _ = verify(tmp_path / "run", capsys)
    assert code == 0
    assert "is of another run (another); it was not read" in lines[-1]
