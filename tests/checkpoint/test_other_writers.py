"""A checkpoint of which another process writes files: committed when all are there, or given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from megatrain.checkpoint import format
from megatrain.checkpoint.background import ChunkWriter
from megatrain.checkpoint.format import FileEntry
from megatrain.checkpoint.load import find, verify
from megatrain.checkpoint.saver import OtherWriters, Saver, Wanted
from megatrain.errors import OutputError
from megatrain.train.saves.nodes import NodeSaves

THEIRS = b"what another process has written"


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    saver = Saver(tmp_path, ChunkWriter(1, ()))
    yield saver
    saver.close()


def entry_of(name: str) -> FileEntry:
    return FileEntry(name=name, num_bytes=len(THEIRS), digests=(xxhash.xxh3_128_hexdigest(THEIRS),))


def begin(saver: Saver, write_rest: Callable[[Path], Any]) -> tuple[OtherWriters, Path]:
    """Begin a save; return what it is told, and its directory."""
    others, made = OtherWriters(), list[Path]()
    wanted = Wanted(
        step=1, files=(), write_rest=write_rest, meta={}, keep_last=1, others=others, made=made.append
    )
    saver.begin(wanted, ())
    return others, made[0]


def write_own(directory: Path) -> None:
    (directory / "own").write_text("own")


def test_the_entries_of_others_are_in_the_manifest_and_are_not_read_again(saver: Saver) -> None:
    others, directory = begin(saver, write_own)
    others.own.result(60)
    assert not saver.is_done
    (directory / "theirs").write_bytes(bytes(len(THEIRS)))  # other bytes than they say
    others.files.set_result({"theirs": entry_of("theirs")})
    path = saver.result()
    entries = {entry.name: entry for entry in verify(path, digests=False).files}
    assert entries["theirs"] == entry_of("theirs")
    assert set(entries) == {"own", "theirs"}


def test_a_file_that_is_not_seen_here_ends_the_save(saver: Saver, tmp_path: Path) -> None:
    others, directory = begin(saver, write_own)
    others.files.set_result({"theirs": entry_of("theirs")})
    with pytest.raises(OutputError, match=r"theirs was written, but cannot be seen from here"):
        saver.result()
    assert not directory.exists()
    assert find(tmp_path) == []


def test_own_failure_is_told_and_the_directory_goes_once_nobody_writes_there(saver: Saver) -> None:
    def fail(directory: Path) -> None:
        raise OutputError("no room here")

    others, directory = begin(saver, fail)
    assert isinstance(others.own.exception(60), OutputError)
    assert directory.exists()
    assert not saver.is_done
    others.files.set_exception(OutputError("the others were told"))
    with pytest.raises(OutputError, match="no room here"):
        saver.result()
    assert not directory.exists()


def test_a_failure_of_others_ends_the_save(saver: Saver, tmp_path: Path) -> None:
    others, directory = begin(saver, write_own)
    others.files.set_exception(OutputError("no room there"))
    with pytest.raises(OutputError, match="no room there"):
        saver.result()
    assert not directory.exists()
    assert not any(format.is_leftover(path.name) for path in tmp_path.iterdir())


def test_a_node_whose_run_ends_gives_up_without_an_error_of_its_own() -> None:
    """Else that one would stand in place of what has ended the run."""

    class Writer:
        error: Exception | None = None

        def fail(self, error: Exception) -> None:
            self.error = error

        def wait(self) -> None:
            assert self.error is not None
            raise self.error

    writer: Any = Writer()
    ranks: Any = SimpleNamespace(rank=1)
    nodes = NodeSaves(ranks, writer)
    nodes._is_begun, nodes._is_settled = True, False
    nodes.give_up(RuntimeError("the run ends"))
    assert str(writer.error) == "the run ends"
