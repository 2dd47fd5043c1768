"""Checkpoints that are written while the state they hold goes on changing."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain import files
from megatrain.checkpoint import chunk_files, format, load
from megatrain.checkpoint.background import ChunkWriter
from megatrain.checkpoint.contents import Group, LargeFile, Lent
from megatrain.checkpoint.save import save
from megatrain.checkpoint.saver import Saver, Wanted
from megatrain.checkpoint.tensor_files import TensorSource, planned_file, write_safetensors
from megatrain.config import Config
from megatrain.errors import OutputError

CHUNK = 8192


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "CHUNK_BYTES", CHUNK)


class State:
    """Blocks of two tensors each, one file of all first ones and one file per block of the second ones."""

    def __init__(self, sizes: Sequence[int] = (3000, 5000, 1, 9000)) -> None:
        self.sizes = sizes
        self.first = [torch.arange(size, dtype=torch.float32) + 1000 * n for n, size in enumerate(sizes)]
        self.second = [torch.arange(size, dtype=torch.int16) + n for n, size in enumerate(sizes)]
        self.lent = 0

    @contextmanager
    def _lend(self, tensors: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        self.lent += 1
        yield tensors
        self.lent -= 1

    def planned(self) -> list[LargeFile]:
        specs, groups = {}, {}
        for number, tensor in enumerate(self.first):
            specs[f"w{number}"] = tensor.dtype, tuple(tensor.shape)
            read = partial(self._lend, {f"w{number}": tensor})
            groups[f"w{number}"] = Group(blocks=frozenset([number]), read=read)
        found = [planned_file("model.safetensors", specs, groups)]
        for number, tensor in enumerate(self.second):
            group = Group(blocks=frozenset([number]), read=partial(self._lend, {"m": tensor}))
            specs = {"m": (tensor.dtype, tuple(tensor.shape))}
            found.append(planned_file(f"state/block-{number}.safetensors", specs, {"m": group}))
        return found

    def write(self, directory: Path) -> None:
        write_safetensors(
            directory / "model.safetensors", [_source(f"w{n}", t) for n, t in enumerate(self.first)]
        )
        files.make_private_directory(directory / "state")
        for number, tensor in enumerate(self.second):
            write_safetensors(directory / f"state/block-{number}.safetensors", [_source("m", tensor)])
        _rest(directory)

    def change(self, number: int) -> None:
        self.first[number].add_(0.5)
        self.second[number].add_(1)


def _source(name: str, tensor: Tensor) -> TensorSource:
    return TensorSource(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), get=lambda: tensor)


def _rest(directory: Path) -> None:
    files.write_bytes_durably(directory / "config.json", b"{}")


def wanted(state: State, step: int = 1, rest: Any = _rest) -> Wanted:
    return Wanted(step=step, files=state.planned(), write_rest=rest, meta={"a": 1}, keep_last=2)


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
    }


@contextmanager
def saver(root: Path, state: State, buffer_bytes: int) -> Iterator[Saver]:
    found = Saver(root, ChunkWriter(buffer_bytes, state.planned()))
    try:
        yield found
    finally:
        found.close()


def slow(monkeypatch: pytest.MonkeyPatch, held: threading.Event) -> None:
    """Let no write end before `held` is set."""

    class Slow(files.FileCalls):
        def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
            assert held.wait(20)
            return super().write_at(descriptor, data, offset)

    monkeypatch.setattr(files, "system", Slow())


@pytest.mark.parametrize("buffer_bytes", [1, 3 * CHUNK, 1 << 30])
@pytest.mark.parametrize("order", [(), (0, 1, 2, 3), (3, 1, 0, 2)])
def test_files_are_those_of_the_blocking_save_though_blocks_change(
    tmp_path: Path, buffer_bytes: int, order: Sequence[int]
) -> None:
    state = State()
    plain = save(tmp_path / "plain", step=1, write=state.write, meta={"a": 1}, keep_last=2)
    with saver(tmp_path / "own", state, buffer_bytes) as own:
        own.begin(wanted(state), order)
        for number in order or range(4):
            own.writer.before_change(number)
            state.change(number)
        path = own.result()
    assert contents(path) == contents(plain)
    assert load.verify(path).step == 1
    assert state.lent == 0


def test_a_change_waits_only_until_its_block_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State()
    plain = save(tmp_path / "plain", step=1, write=state.write, meta={"a": 1}, keep_last=2)
    held = threading.Event()
    slow(monkeypatch, held)
    with saver(tmp_path / "own", state, 1 << 30) as own:
        own.begin(wanted(state), ())
        for number in (3, 0, 2, 1):
            own.writer.before_change(number)  # returns, though nothing is on the disk
            state.change(number)
        assert not own.is_done
        held.set()
        path = own.result()
    assert contents(path) == contents(plain)


def test_with_one_buffer_a_change_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    held = threading.Event()
    slow(monkeypatch, held)
    with saver(tmp_path / "own", state, 1) as own:
        assert own.writer.nbytes == CHUNK
        own.begin(wanted(state), ())
        waiting = threading.Thread(target=own.writer.before_change, args=(3,))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        held.set()
        waiting.join(20)
        assert not waiting.is_alive()
        assert own.writer.waited_s > 0.1
        own.result()


def test_a_block_that_changes_unasked_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the blocking save can fail."""
    state = State()
    plain = save(tmp_path / "plain", step=1, write=state.write, meta={"a": 1}, keep_last=2)
    held = threading.Event()
    slow(monkeypatch, held)
    with saver(tmp_path / "own", state, 1) as own:
        own.begin(wanted(state), ())
        state.change(3)
        held.set()
        assert contents(own.result()) != contents(plain)


def test_blocks_apart_are_read_by_the_caller_alone(tmp_path: Path) -> None:
    state, threads = State(), []
    planned = state.planned()

    @contextmanager
    def lend(number: int) -> Iterator[Mapping[str, Tensor]]:
        threads.append(threading.current_thread())
        yield {"m": state.second[number]}

    for number in (1, 3):
        place = planned[1 + number].places[0]
        group = Group(blocks=frozenset([number]), read=partial(lend, number))
        tensor = state.second[number]
        specs = {"m": (tensor.dtype, tuple(tensor.shape))}
        planned[1 + number] = planned_file(f"state/block-{number}.safetensors", specs, {"m": group})
        assert planned[1 + number].places[0].begin == place.begin
    with saver(tmp_path / "own", state, 1 << 20) as own:
        begun = Wanted(step=1, files=planned, write_rest=_rest, meta={"a": 1}, keep_last=2)
        own.begin(begun, (), apart={1, 3})
        assert {thread.name for thread in threads} == {"MainThread"}
        assert len(threads) == 2  # each is read once, though it has several chunks
        plain = save(tmp_path / "plain", step=1, write=state.write, meta={"a": 1}, keep_last=2)
        assert contents(own.result()) == contents(plain)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("at", [0, 3])
def test_a_write_that_fails_lets_changes_go_on_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: int
) -> None:
    state = State()
    calls = iter(range(1000))

    class Full(files.FileCalls):
        def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
            if next(calls) >= at:
                raise OSError(number, os.strerror(number))
            return super().write_at(descriptor, data, offset)

    with saver(tmp_path / "own", state, 1) as own:
        with monkeypatch.context() as patch:
            patch.setattr(files, "system", Full())
            own.begin(wanted(state), ())
            for block in range(4):
                own.writer.before_change(block)
            with pytest.raises(OutputError, match=os.strerror(number)):
                own.result()
        assert not own.is_saving
        assert list((tmp_path / "own").iterdir()) == []
        own.begin(wanted(state, step=2), ())  # and the next one is whole
        assert load.verify(own.result()).step == 2


def test_an_error_in_the_small_files_or_in_reading_ends_the_save(tmp_path: Path) -> None:
    state = State()

    def refuse(directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with saver(tmp_path / "own", state, 1) as own:
        own.begin(wanted(state, rest=refuse), ())
        with pytest.raises(OutputError, match="No space"):
            own.result()
        planned = state.planned()
        del state.second[:]
        planned[1].places[0].group.__dict__["read"] = lambda: 1 / 0
        own.begin(Wanted(step=1, files=planned, write_rest=_rest, meta={}, keep_last=1), ())
        with pytest.raises(ZeroDivisionError):
            own.result()
    assert list((tmp_path / "own").iterdir()) == []


def test_short_writes_and_refused_direct_writes_end_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State()
    plain = save(tmp_path / "plain", step=1, write=state.write, meta={"a": 1}, keep_last=2)
    refused: list[int] = []

    class Short(files.FileCalls):
        def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
            if not refused:
                refused.append(offset)
                raise OSError(errno.EINVAL, "not direct")
            return super().write_at(descriptor, data[: max(1, len(data) // 3)], offset)

    monkeypatch.setattr(chunk_files, "DIRECT_BYTES", 1)
    monkeypatch.setattr(files, "system", Short())
    with saver(tmp_path / "own", state, 3 * CHUNK) as own:
        own.begin(wanted(state), ())
        assert contents(own.result()) == contents(plain)


def interrupted_soon() -> threading.Timer:
    """Send this process a Ctrl-C, in a moment at which it waits."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("waits", ["before_change", "result"])
def test_an_interrupt_of_a_wait_loses_nothing_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    state, held = State(), threading.Event()
    plain = save(tmp_path / "plain", step=1, write=state.write, meta={"a": 1}, keep_last=2)
    slow(monkeypatch, held)
    with saver(tmp_path / "own", state, 1) as own:
        own.begin(wanted(state), ())
        timer = interrupted_soon()
        with pytest.raises(KeyboardInterrupt):
            own.result() if waits == "result" else own.writer.before_change(3)
        timer.join()
        assert own.is_saving
        assert not own.is_done
        held.set()
        assert own.ends_within(20)
        assert contents(own.result()) == contents(plain)


def test_an_interrupt_between_two_lines_leaves_no_chunk_that_nobody_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk that the interrupted thread had taken, and its buffer, are gone: so is the checkpoint."""
    state, held, fill_of = State(), threading.Event(), ChunkWriter._fill

    def fill(writer: ChunkWriter, *given: Any, is_urgent: bool = False) -> bool:
        if is_urgent:
            raise KeyboardInterrupt
        assert held.wait(20)
        return fill_of(writer, *given)

    monkeypatch.setattr(ChunkWriter, "_fill", fill)
    with saver(tmp_path / "own", state, 1 << 30) as own:
        own.begin(wanted(state), ())
        with pytest.raises(KeyboardInterrupt):
            own.writer.before_change(3)
        held.set()
        assert own.ends_within(20)
        with pytest.raises(KeyboardInterrupt):
            own.result()
    assert list((tmp_path / "own").iterdir()) == []


def test_an_interrupt_of_a_copy_ends_the_checkpoint_and_the_caller(tmp_path: Path) -> None:
    """What the caller reads takes long where it is on drives, and so long a Ctrl-C must not be lost."""
    state = State()
    planned = state.planned()

    def interrupt() -> Any:
        raise KeyboardInterrupt

    planned[1].places[0].group.__dict__["read"] = interrupt
    with saver(tmp_path / "own", state, 1 << 20) as own:
        begun = Wanted(step=1, files=planned, write_rest=_rest, meta={"a": 1}, keep_last=2)
        with pytest.raises(KeyboardInterrupt):
            own.begin(begun, (), apart={0})
        assert not own.is_saving
        assert list((tmp_path / "own").iterdir()) == []
        own.begin(wanted(state, step=2), ())
        assert load.verify(own.result()).step == 2


def test_what_a_failed_save_was_lent_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, though its error, and the frames that raised it, are still known."""
    state, calls = State(), iter(range(1000))

    class Full(files.FileCalls):
        def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
            if next(calls) >= 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write_at(descriptor, data, offset)

    monkeypatch.setattr(files, "system", Full())
    with saver(tmp_path / "own", state, 1) as own:
        own.begin(wanted(state), (), apart={0})
        with pytest.raises(OutputError) as failed:
            own.result()
        assert state.lent == 0
        assert "No space" in str(failed.value)


def test_every_reader_of_a_group_is_told_why_it_cannot_be_read() -> None:
    (place,) = State().planned()[1].places
    place.group.__dict__["read"] = _refusing
    lent, (part,) = Lent(place.group), LargeFile("a", b"", [replace(place, begin=0)]).parts(0, 100)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            lent.bytes_of(part)


@contextmanager
def _refusing() -> Iterator[Mapping[str, Tensor]]:
    yield {"m": torch.ones(1 // 0)}


def test_what_does_not_lie_in_one_piece_is_copied_once() -> None:
    """And not for each chunk: a fused weight has hundreds of these."""
    value = torch.arange(12, dtype=torch.int32).view(3, 4).T
    group = Group(blocks=frozenset(), read=lambda: nullcontext({"m": value}))
    specs = {"m": (value.dtype, tuple(value.shape))}
    file = planned_file("a", specs, {"m": group})
    (part,) = file.parts(0, file.num_bytes)
    lent = Lent(group)
    first, second = lent.bytes_of(part), lent.bytes_of(part)
    assert np.shares_memory(first, second)
    assert first.tobytes() == value.contiguous().numpy().tobytes()


def test_the_least_buffer_is_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    checkpoint = Config.model_fields["checkpoint"].annotation
    assert checkpoint is not None
    least = next(m.ge for m in checkpoint.model_fields["buffer"].metadata if hasattr(m, "ge") and m.ge > 1)
    assert least == format.CHUNK_BYTES
