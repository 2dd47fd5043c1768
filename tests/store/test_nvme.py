"""State on drives: what was committed is found again whole, and what is damaged is named."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatrain.errors import CapacityError, CheckpointError, ConfigError, OutputError
from megatrain.store.drives import system as calls
from megatrain.store.drives.drive import staging
from megatrain.store.drives.places import check_places
from megatrain.store.drives.record import RECORD_NAME
from megatrain.store.drives.striped import Extent, StripedStore
from tests.store.disks import (
    EXTENTS,
    Counted,
    Failing,
    Full,
    Killed,
    Short,
    WithoutDirect,
    content,
    holds,
    make_store,
    write_step,
)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can see whether something was synced, and it takes most of the time."""
    monkeypatch.setattr(calls, "system", Counted())


@pytest.fixture(params=[1, 2, 3])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StripedStore]:
    made = make_store(tmp_path, request.param)
    made.create()
    yield made
    made.close()


def test_what_is_written_is_read_before_and_after_a_commit(store: StripedStore) -> None:
    for step in range(4):
        write_step(store, step, commits=False)
        assert holds(store, step)
        if step % 2:
            store.commit(step, {})
            assert holds(store, step)


def test_a_store_resumes_from_what_was_committed(tmp_path: Path, store: StripedStore) -> None:
    num_drives = len(store.directories)
    for step in (1, 2):
        write_step(store, step)
    for step in (3, 4):  # twice, so that every place but the committed ones is overwritten
        write_step(store, step, commits=False)
    store.close()
    again = make_store(tmp_path, num_drives)
    record = again.resume()
    assert (record.step, record.meta) == (2, {"step": 2})
    assert holds(again, 2)
    write_step(again, 3)
    assert holds(again, 3)
    again.close()


def test_an_extent_that_was_not_written_again_keeps_its_copy(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.create()
    write_step(store, 1)
    store.write(1, content(1, 2))
    store.commit(2, {})
    store.write(0, content(0, 3))
    store.commit(3, {})
    store.close()
    store.resume()
    found = [staging(extent.num_bytes) for extent in EXTENTS]
    for number, step in ((0, 3), (1, 2), (2, 1)):
        store.read(number, found[number])
        assert torch.equal(found[number], content(number, step))
    store.close()


def test_chunks_are_spread_evenly_over_drives_and_share_no_byte(tmp_path: Path) -> None:
    extents = [Extent(f"extent {number}", 4096 * (1 + 3 * number)) for number in range(7)]
    store = StripedStore([tmp_path / "a", tmp_path / "b", tmp_path / "c"], extents, chunk_bytes=8192)
    places = [
        (chunk.drive, offset + byte)
        for chunks in store._chunks
        for chunk in chunks
        for offset in chunk.offsets
        for byte in range(0, chunk.stop - chunk.start, 4096)
    ]
    assert len(places) == len(set(places)) == 2 * sum(extent.num_bytes for extent in extents) // 4096
    assert max(store.drive_bytes) - min(store.drive_bytes) <= 4 * 8192


@pytest.mark.parametrize("system", [Short, WithoutDirect])
def test_short_transfers_and_a_file_system_without_direct_io_change_no_bit(
    system: type[calls.DriveCalls],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(calls, "system", system())
    store = make_store(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        store.create()
    assert store.is_direct == (system is Short)
    messages = [record.message for record in caplog.records]
    assert len(messages) == (0 if system is Short else 2)
    assert all("takes no direct I/O" in message and "GB/s" in message for message in messages)
    write_step(store, 1)
    store.close()
    store.resume()
    assert holds(store, 1)
    store.close()


@pytest.mark.parametrize("bit", [0, 7 * 4096 + 5, 8 * 40000])
def test_a_flipped_bit_is_found_and_named(bit: int, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.create()
    write_step(store, 1)
    write_step(store, 2)
    owners = {
        place // 8: (number, index)
        for number, chunks in enumerate(store._chunks)
        for index, chunk in enumerate(chunks)
        for byte in [chunk.offsets[store._tables.current(number)]]
        for place in range(8 * byte, 8 * (byte + chunk.stop - chunk.start), 8)
    }
    where = min((place for place in owners if place >= bit // 8), default=0)
    extent, chunk = owners[where]
    file = tmp_path / "drive0" / "state.bin"
    with file.open("r+b") as handle:
        handle.seek(where)
        value = handle.read(1)[0]
        handle.seek(where)
        handle.write(bytes([value ^ (1 << bit % 8)]))
        handle.flush()
        os.fsync(handle.fileno())
    for number, other in enumerate(EXTENTS):
        if number != extent:
            store.read(number, staging(other.num_bytes))
    with pytest.raises(CheckpointError) as error:
        store.read(extent, staging(EXTENTS[extent].num_bytes))
    assert f"{file} is damaged: chunk {chunk} of {EXTENTS[extent].name} " in str(error.value)
    store.close()


def test_a_kill_at_any_call_leaves_the_last_committed_step(tmp_path: Path) -> None:
    """In a child per call: one dies half-way through a write, another between a rename and its sync."""
    at, steps = 0, set()
    while True:
        root = tmp_path / str(at)
        root.mkdir()
        store = make_store(root, 2)
        child = os.fork()
        if not child:
            code = 1
            try:
                store.create()
                write_step(store, 1)
                write_step(store, 2)
                calls.system = Killed(at)
                write_step(store, 3)
                write_step(store, 4)
                code = 0
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -9)
        record = store.resume()
        assert holds(store, record.step)
        assert record.meta == {"step": record.step}
        store.close()
        steps.add(record.step)
        if status == 0:
            break
        at += 1
    assert steps == {2, 3, 4}
    assert at > 20


@pytest.mark.parametrize("call", ["write", "fdatasync", "fsync", "rename"])
def test_after_a_failure_nothing_is_committed_and_the_old_step_is_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, 2)
    store.create()
    write_step(store, 1)
    monkeypatch.setattr(calls, "system", Failing(call, number=errno.EIO))
    with pytest.raises(
        OutputError, match=r"cannot write .*drive.: Input/output error|cannot write .*: Input"
    ):
        write_step(store, 2)
    monkeypatch.setattr(calls, "system", Counted())
    with pytest.raises(OutputError, match="no step can be committed after cannot write"):
        store.commit(2, {})
    store.close()
    assert store.resume().step == 1
    assert holds(store, 1)
    store.close()


# -- what is refused -----------------------------------------------------------------------------------------


def test_a_drive_without_room_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "system", Full())
    with pytest.raises(
        CapacityError, match=r"drive of .*drive0 has 50,000 bytes free, but the state needs 106,496 bytes"
    ):
        make_store(tmp_path, 2).create()
    assert list(tmp_path.iterdir()) == []


def test_a_drive_that_fills_up_meanwhile_is_refused_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "system", Failing("fallocate"))
    with pytest.raises(CapacityError, match=r"cannot take .* for .*state\.bin: No space left"):
        make_store(tmp_path).create()
    assert (tmp_path / "drive0" / "state.bin").stat().st_blocks == 0


def test_a_path_that_is_no_directory_or_has_no_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drive0").write_text("a file")
    with pytest.raises(OutputError, match=r"cannot use .*drive0: Not a directory; check this path"):
        make_store(tmp_path).create()
    with pytest.raises(OutputError, match="neither it nor its parent directory exists"):
        make_store(tmp_path / "missing").create()


def test_a_directory_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drive0").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(OutputError, match=r"cannot use .*drive0: Permission denied; name a directory"):
        make_store(tmp_path).create()


def test_a_directory_that_is_named_twice_or_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="twice"):
        StripedStore([tmp_path, tmp_path / "link"], EXTENTS).create()
    with pytest.raises(ConfigError, match=r"memory\.tiers\.nvme is empty"):
        check_places([], [])


def test_state_of_another_run_is_neither_read_nor_overwritten(tmp_path: Path) -> None:
    store = make_store(tmp_path, owner="run one")
    store.create()
    with pytest.raises(OutputError, match=r"state\.bin is in use by another run"):
        make_store(tmp_path, owner="run one").create()
    write_step(store, 1)
    store.close()
    for begin in (StripedStore.create, StripedStore.resume):
        with pytest.raises(OutputError, match=r"state of another run \(run one, step 1\)"):
            begin(make_store(tmp_path, owner="run two"))
    assert store.resume().step == 1
    assert holds(store, 1)
    store.remove()
    assert list((tmp_path / "drive0").iterdir()) == []


def test_what_does_not_belong_together_is_not_resumed(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"has no commit\.json"):
        store.resume()
    store.create()
    write_step(store, 1)
    store.close()
    other = StripedStore(store.directories, [*EXTENTS, Extent("more", 4096)], chunk_bytes=store.chunk_bytes)
    with pytest.raises(CheckpointError, match=r"of another model, train\.precision, memory"):
        other.resume()
    first, second = ((directory / "state.bin") for directory in store.directories)
    (tmp_path / "aside").write_bytes(first.read_bytes())
    first.write_bytes(second.read_bytes().ljust(first.stat().st_size, b"\0")[: first.stat().st_size])
    with pytest.raises(CheckpointError, match=r"is not the file that .*commit\.json names|has not the size"):
        store.resume()
    first.write_bytes((tmp_path / "aside").read_bytes())
    assert store.resume().step == 1
    store.close()
    record = tmp_path / "drive0" / RECORD_NAME
    record.write_bytes(record.read_bytes().replace(b'"step": 1', b'"step": 2'))
    with pytest.raises(CheckpointError, match="differs from its own digest"):
        store.resume()
