"""Several nodes save behind training: each writes its own share of a checkpoint into one directory."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatrain import files
from megatrain.checkpoint import format
from megatrain.checkpoint.load import find, verify
from megatrain.errors import CheckpointError, RankError
from megatrain.layout.ownership import CUT_NUMEL
from megatrain.train import loop
from tests.distributed.cases import cut_at
from tests.distributed.crew import Crew
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.run.test_saves import assert_unsaved, save_run
from tests.distributed.runs import train_run
from tests.train.tensors import tensors_in
from tests.train.test_loop import assert_same_runs, rows_of

CUT = 320
"""Elements: each node has a part of every block, and of most parameters."""
QUICK: dict[str, Any] = {"eval": {}, "data": {"val_size": 0}}
STEPS = (6, 4, 2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two nodes of one rank each, which end if one keeps the other waiting for a minute."""
    crew = Crew(tmp_path_factory.mktemp("pair") / "ranks", 2, num_nodes=2, timeout_s=60.0)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def saved(pair: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two nodes, with blocking saves in `plain`, and behind training in `own`."""
    root = tmp_path_factory.mktemp("saved")
    place: dict[str, Any] = {"root": str(root), "cut": CUT, **QUICK}
    pair.run(save_run, out="plain", background=False, **place)
    told = pair.run(save_run, out="own", **place)
    assert told[0][2] == [], "nothing of step 2 was whole when step 3 ended, and the run went on"
    return root


def assert_same_checkpoints(run: Path, expected: Path) -> None:
    """Check that all checkpoints of two runs hold the same tensors, bit for bit, and are whole."""
    places = find(run / "checkpoints")
    assert [place.name for place in places] == [place.name for place in find(expected / "checkpoints")]
    for place in places:
        verify(place)
        left, right = tensors_in(place), tensors_in(expected / "checkpoints" / place.name)
        assert left.keys() == right.keys()
        assert [name for name, tensor in left.items() if not torch.equal(tensor, right[name])] == []


def test_checkpoints_of_nodes_have_the_state_of_blocking_saves(saved: Path) -> None:
    assert_same_checkpoints(saved / "own", saved / "plain")
    assert_same_runs(saved / "own", saved / "plain")
    newest = find(saved / "own/checkpoints")[0]
    names = {path.name for path in (newest / "state").iterdir()}
    assert {"block-00001-node-0.safetensors", "block-00001-node-1.safetensors"} <= names
    plain = {path.name for path in (saved / "plain/checkpoints" / newest.name / "state").iterdir()}
    assert not names & plain


ALONE: dict[str, Any] = {
    "train": {"device": "emulated"},
    "memory": {"resident_blocks": 2, "mirror_resident": False},
}
KINDS: dict[str, dict[str, Any]] = {
    "host": {},
    "int8": {"optim": {"state": "int8"}},
    "serial": {"optim": {"updates": "serial"}},
    "fragments": {"memory": {"fragments": True}},
    "resident": {"train": {"device": "emulated"}, "memory": {"resident_blocks": 2}},
    "alone": ALONE,
    "alone, whole segments": {**ALONE, "cut": CUT_NUMEL},
}


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (4, "host"),
        *(pytest.param(4, kind, marks=pytest.mark.parity) for kind in KINDS if kind != "host"),
        *(pytest.param(2, kind, marks=pytest.mark.parity) for kind in KINDS if kind != "host"),
    ],
)
def test_each_kind_of_state_is_saved_by_its_nodes(saved: Path, tmp_path: Path, size: int, kind: str) -> None:
    place: dict[str, Any] = {"root": str(tmp_path), "num_nodes": 2, "cut": CUT, **QUICK} | KINDS[kind]
    told = run_ranks(tmp_path / "own-ranks", size, save_run, out="own", **place)
    assert told[0][2] == []
    plain = saved / "plain"  # no bit depends on the number of ranks
    if kind != "host":
        plain = tmp_path / "plain"
        run_ranks(tmp_path / "plain-ranks", size, save_run, out="plain", background=False, **place)
    assert_same_checkpoints(tmp_path / "own", plain)
    assert_same_runs(tmp_path / "own", plain)


@pytest.mark.parity
def test_state_on_drives_of_nodes_is_saved_by_each(tmp_path: Path) -> None:
    for out, background in (("plain", False), ("own", True)):
        tiers = {"ram": 800_000, "nvme": [str(tmp_path / f"{out}-drive")]}
        memory = {"activations": "recompute", "fragments": False, "tiers": tiers}
        place: dict[str, Any] = {"root": str(tmp_path), "out": out, "background": background, "holds": False}
        run_ranks(tmp_path / f"{out}-ranks", 2, save_run, num_nodes=2, cut=CUT, memory=memory, **place)
    assert_same_checkpoints(tmp_path / "own", tmp_path / "plain")


@pytest.mark.parametrize(
    ("size", "num_nodes"),
    [
        (1, 1),
        pytest.param(2, 2, marks=pytest.mark.parity),
        pytest.param(2, 1, marks=pytest.mark.parity),
        pytest.param(4, 4, marks=pytest.mark.parity),
    ],
)
def test_any_number_of_nodes_goes_on_from_what_nodes_have_saved(
    saved: Path, pair: Crew, tmp_path: Path, size: int, num_nodes: int
) -> None:
    out = tmp_path.name
    before = saved / "own/checkpoints/step-00000002"
    shutil.copytree(before, saved / out / "checkpoints" / before.name)
    place: dict[str, Any] = {"root": str(saved), "out": out, "cut": CUT, "holds": False, **QUICK}
    if (size, num_nodes) == (2, 2):
        pair.run(save_run, **place)
    else:
        run_ranks(tmp_path / "ranks", size, save_run, num_nodes=num_nodes, **place)
    assert_same_checkpoints(saved / out, saved / "plain")
    losses = [[row["loss"] for row in rows_of(saved / run)] for run in (out, "plain")]
    assert losses[0] == losses[1][2:]


@pytest.mark.parity
@pytest.mark.parametrize("full_on", [0, 2])
def test_nodes_with_state_on_devices_alone_go_on_after_a_node_found_no_room(
    tmp_path: Path, full_on: int
) -> None:
    """Ranks lend what they have, though nobody writes it any more."""
    place: dict[str, Any] = {"root": str(tmp_path), "num_nodes": 2, **QUICK, **ALONE}
    run_ranks(tmp_path / "ranks", 4, save_run, out="own", holds=False, full=4, full_on=full_on, **place)
    assert_unsaved(tmp_path / "own", step=4)


@pytest.mark.parametrize("full_on", [1, pytest.param(0, marks=pytest.mark.parity)])
def test_a_node_without_room_ends_the_save_of_all_and_the_run_goes_on(
    saved: Path, pair: Crew, tmp_path: Path, full_on: int
) -> None:
    out = tmp_path.name
    place: dict[str, Any] = {"root": str(saved), "out": out, "cut": CUT, **QUICK}
    pair.run(save_run, holds=False, full=4, full_on=full_on, **place)
    assert_same_runs(saved / out, saved / "plain")
    assert_unsaved(saved / out, step=4)
    assert [path.name for path in (saved / out / "checkpoints").iterdir() if path.name[0] == "."] == []


class Held(files.FileCalls):
    """A disk that writes nothing of a checkpoint until it is let go."""

    def __init__(self) -> None:
        self.writes = threading.Event()
        self.writes.set()

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        assert self.writes.wait(60)
        return super().write_at(descriptor, data, offset)


def killed_in_a_save(ranks: Any, *, root: str, out: str, killed: int) -> None:
    """Train until a rank is killed after step 5, while it writes its share of the save of step 4."""
    disk, take = Held(), loop.train_step

    def stepped(run: Any) -> Any:
        row = take(run)
        if run.step == 3 and ranks.rank == killed:
            disk.writes.clear()
        if run.step == 5 and ranks.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    checkpoint = {"every": 2, "keep_last": None, "buffer": 2**26}
    with (
        cut_at(CUT),
        patch.object(format, "CHUNK_BYTES", 4096),
        patch.object(files, "system", disk),
        patch.object(loop, "train_step", stepped),
    ):
        train_run(ranks, root=root, out=out, checkpoint=checkpoint, **QUICK)


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.parity)])
def test_a_node_that_is_killed_in_a_save_leaves_the_checkpoint_before(
    saved: Path, pair: Crew, tmp_path: Path, killed: int
) -> None:
    place: dict[str, Any] = {"root": str(saved), "out": tmp_path.name}
    codes = exit_codes(tmp_path / "ranks", 2, killed_in_a_save, num_nodes=2, killed=killed, **place)
    assert codes.pop(killed) == -signal.SIGKILL
    assert codes == [RankError.exit_code]
    run = saved / tmp_path.name
    assert [path.name for path in find(run / "checkpoints")] == ["step-00000002"]
    verify(find(run / "checkpoints")[0])
    left = [path for path in (run / "checkpoints").iterdir() if format.is_leftover(path.name)]
    assert len(left) == (1 if killed == 0 else 0), "what the first rank lives to remove, it removes"
    pair.run(save_run, cut=CUT, holds=False, **place, **QUICK)
    assert_same_runs(run, saved / "plain")
    assert not any(format.is_leftover(path.name) for path in (run / "checkpoints").iterdir())


def test_nodes_that_stop_for_a_save_go_on_after_one_that_found_no_room(
    saved: Path, pair: Crew, tmp_path: Path
) -> None:
    """All learn at once of an error of the rank that writes, in the middle of what the other lends it."""
    place: dict[str, Any] = {"root": str(saved), "out": tmp_path.name, "cut": CUT, **QUICK}
    pair.run(save_run, background=False, full=4, **place)
    assert_same_runs(saved / tmp_path.name, saved / "plain")
    assert_unsaved(saved / tmp_path.name, step=4)


def save_apart(ranks: Any, *, root: str) -> list[Any]:
    """Train as `save_run`, in a directory that each node has for itself; return what was said of that."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger, before = logging.getLogger("megatrain"), os.getcwd()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    own = Path(root, f"node-{ranks.node}")
    own.mkdir()
    os.chdir(own)
    try:
        seen = save_run(ranks, root=".", out="run", cut=CUT, **QUICK)
    finally:
        os.chdir(before)
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [seen, [text for text in said if "do not share" in text]]


def test_nodes_without_a_directory_in_common_stop_for_a_save(saved: Path, pair: Crew, tmp_path: Path) -> None:
    (seen, said), (_, said_by_other) = pair.run(save_apart, root=str(tmp_path))
    assert seen[2] == ["step-00000002"], "it was whole when step 3 began"
    assert [text.split(",")[0] for text in said] == ["the nodes do not share run/checkpoints"]
    assert said_by_other == []
    assert not (tmp_path / "node-1/run").exists()
    assert_same_checkpoints(tmp_path / "node-0/run", saved / "plain")


class Reads(files.FileCalls):
    """Count the bytes that are read of a checkpoint, of its state and of its weights."""

    def __init__(self) -> None:
        self.num_bytes = {"state": 0, "weights": 0}

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        count = super().read_into(descriptor, buffer, offset)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if "checkpoints" in path.parts and path.suffix == ".safetensors":
            self.num_bytes["state" if path.parent.name == "state" else "weights"] += count
        return count


def resume_and_count(ranks: Any, *, root: str, out: str) -> dict[str, int]:
    """Go on from the newest checkpoint; return how many bytes were read of it before the first step."""
    reads, take = Reads(), loop.train_step
    found: dict[str, int] = {}

    def stepped(run: Any) -> Any:
        found.update(reads.num_bytes if not found else {})
        return take(run)

    with patch.object(loop, "train_step", stepped):
        save_run(ranks, root=root, out=out, cut=CUT, holds=False, counts=reads, **QUICK)
    return found


def test_a_node_reads_its_part_of_the_state_once(saved: Path, pair: Crew, tmp_path: Path) -> None:
    """The first one compares all files before it loads them; the others what they read, as they read it."""
    before = saved / "own/checkpoints/step-00000004"
    shutil.copytree(before, saved / tmp_path.name / "checkpoints" / before.name)
    sizes = {"state": 0, "weights": 0}
    own = 0
    for file in before.rglob("*.safetensors"):
        sizes["state" if file.parent.name == "state" else "weights"] += file.stat().st_size
        own += file.stat().st_size if "-node-1" in file.name else 0
    first, second = pair.run(resume_and_count, root=str(saved), out=tmp_path.name)
    headers = 4096 * len(list((before / "state").iterdir()))
    assert own <= second["state"] <= own + headers + 4096 * 12
    assert sizes["weights"] <= second["weights"] <= sizes["weights"] + 4096 * 4
    assert first["weights"] == sizes["weights"], "they are loaded from a mapping then"
    assert first["state"] >= 2 * sizes["state"] - own


def resume_apart(ranks: Any, *, root: str) -> None:
    """Go on in a directory that each node has for itself."""
    os.chdir(Path(root, f"node-{ranks.node}"))
    save_run(ranks, root=".", out="run", cut=CUT, holds=False, **QUICK)


@pytest.mark.parity
def test_damage_in_what_a_node_reads_ends_all_in_a_sentence(saved: Path, tmp_path: Path) -> None:
    for node in range(2):
        there = tmp_path / f"node-{node}"
        shutil.copytree(saved / "own/checkpoints/step-00000004", there / "run/checkpoints/step-00000004")
        shutil.copytree(saved / "model", there / "model")
        shutil.copy(saved / "corpus.txt", there / "corpus.txt")
    file = tmp_path / "node-1/run/checkpoints/step-00000004/state/block-00001-node-1.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[5000] ^= 1
    file.write_bytes(damaged)
    codes = exit_codes(tmp_path / "ranks", 2, resume_apart, num_nodes=2, root=str(tmp_path))
    assert codes == [RankError.exit_code, CheckpointError.exit_code]
    said = (tmp_path / "ranks/errors").read_text()
    assert "Traceback" not in said
    assert "rank 1: node 1: checkpoint " in said
    assert "state/block-00001-node-1.safetensors has wrong contents between bytes 4096 and 8192" in said
