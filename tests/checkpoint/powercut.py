"""A disk that forgets: what the weakest POSIX filesystem may hold when the power is cut in a real save.

Until a file is fsynced any part of its writes may be lost, a later one kept where an earlier one is not;
until a directory is fsynced any subset of the changes to its names may be. After each call a random such
state can be put on a real disk and looked at.

Source: the crash model of ALICE (Pillai et al., OSDI 2014), in its most pessimistic form.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain import files
from tests.checkpoint.faults import Watched


@dataclass
class File:
    """What a file holds for sure, and the writes that may be lost: where they begin, and their bytes."""

    safe: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes that the file has while the power is on."""
        return max([len(self.safe), *(offset + len(data) for offset, data in self.pending)])

    def fsync(self) -> None:
        """Make every write so far safe."""
        self.safe, self.pending = self.after(len), []

    def after(self, kept: Callable[[bytes], int]) -> bytes:
        """Return what it holds where so many bytes of each write are kept; what is lost between is zero."""
        content = bytearray(self.safe)
        for offset, data in self.pending:
            if part := data[: kept(data)]:
                content.extend(bytes(max(0, offset + len(part) - len(content))))
                content[offset : offset + len(part)] = part
        return bytes(content)


@dataclass
class Directory:
    """The names that are there, those that are there for sure, and the changes between."""

    live: dict[str, File | Directory] = field(default_factory=dict)
    safe: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, File | Directory]] = field(default_factory=list)

    def change(self, old: str | None, new: str | None, node: File | Directory) -> None:
        """Note that `node` goes from name `old` to name `new`; None is no name."""
        _apply(self.live, old, new)(node)
        self.pending.append((old, new, node))

    def fsync(self) -> None:
        """Make every change so far safe."""
        self.safe, self.pending = dict(self.live), []


class InTurn(files.FileCalls):
    """Lets the threads of a save make their calls in turn; the one that looks at states makes other ones."""

    def __init__(self, system: files.FileCalls, real: files.FileCalls) -> None:
        super().__init__()
        self._looks = threading.local()
        lock = threading.RLock()

        def call(name: str, *arguments: Any) -> Any:
            if getattr(self._looks, "here", False):
                return getattr(real, name)(*arguments)
            with lock:
                return getattr(system, name)(*arguments)

        for name in vars(files.FileCalls):
            if not name.startswith("_"):
                setattr(self, name, functools.partial(call, name))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Let this thread make the other calls."""
        self._looks.here = True
        try:
            yield
        finally:
            self._looks.here = False


class ForgetfulSystem(Watched):
    """Do the calls, and keep a model of what each one made safe; call `after_call` after each that changes
    it."""

    def __init__(self, root: Path, *, dropped_fsync: int = -1, dropped_name: str = "") -> None:
        super().__init__()
        self.root = root
        self.tree = _read(root)
        self.fsyncs: list[Path] = []
        self.after_call: Callable[[], None] = lambda: None
        self._dropped_fsync, self._dropped_name = dropped_fsync, dropped_name

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        if flags & os.O_CREAT:
            self._change(path, None, path.name, File())
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        count = super().write(descriptor, data)
        node = self._node(self._paths[descriptor])
        assert isinstance(node, File)
        node.pending.append((node.size, bytes(data[:count])))
        self.after_call()
        return count

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        count = super().write_at(descriptor, data, offset)
        node = self._node(self._paths[descriptor])
        assert isinstance(node, File)
        node.pending.append((offset, bytes(data[:count])))
        self.after_call()
        return count

    def fsync(self, descriptor: int) -> None:
        path = self._paths[descriptor]
        self.fsyncs.append(path)
        if len(self.fsyncs) - 1 != self._dropped_fsync and path.name != self._dropped_name:
            node = self._node(path)
            node.fsync()
            self.after_call()

    def mkdir(self, path: Path, mode: int) -> None:
        super().mkdir(path, mode)
        self._change(path, None, path.name, Directory())

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        assert source.parent == target.parent
        self._change(source, source.name, target.name, self._node(source))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._change(path, path.name, None, self._node(path))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self._change(path, path.name, None, self._node(path))

    def after_power_cut(self, chance: random.Random, target: Path) -> None:
        """Put into `target` one of the states that a power cut now could leave."""
        _put(self.tree, target, chance, chance.uniform(-0.1, 1.1))

    def _change(self, path: Path, old: str | None, new: str | None, node: File | Directory) -> None:
        self._directory(path.parent).change(old, new, node)
        self.after_call()

    def _node(self, path: Path) -> File | Directory:
        node: File | Directory = self.tree
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, Directory)
            node = node.live[part]
        return node

    def _directory(self, path: Path) -> Directory:
        node = self._node(path)
        assert isinstance(node, Directory)
        return node


def _apply(
    names: dict[str, File | Directory], old: str | None, new: str | None
) -> Callable[[File | Directory], None]:
    def apply(node: File | Directory) -> None:
        if old is not None and names.get(old) is node:
            del names[old]
        if new is not None:
            names[new] = node

    return apply


def _read(path: Path) -> Directory:
    """Model what is on a real disk, all of it safe."""
    result = Directory()
    for inner in path.iterdir():
        result.live[inner.name] = _read(inner) if inner.is_dir() else File(safe=inner.read_bytes())
    result.fsync()
    return result


def _put(tree: Directory, target: Path, chance: random.Random, share: float) -> None:
    target.mkdir()
    names = dict(tree.safe)
    for old, new, node in tree.pending:
        if chance.random() < share:
            _apply(names, old, new)(node)
    for name, node in names.items():
        if isinstance(node, Directory):
            _put(node, target / name, chance, share)
        else:
            content = node.after(lambda data: chance.choice((0, len(data) // 2, len(data))))
            (target / name).write_bytes(content)
