"""Stand-ins for `files.system` that record, fail or die at a chosen call, and the saves to try them on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain import files
from megatrain.checkpoint import load, save
from megatrain.checkpoint.background import ChunkWriter
from megatrain.checkpoint.contents import LargeFile
from megatrain.checkpoint.saver import Saver, Wanted


class Watched(files.FileCalls):
    """Count the calls, and say before each one what it is about to do to which path.

    Nothing is fsynced: no test can see the difference, and it takes most of the time of a small save.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._lock = threading.RLock()
        self._paths: dict[int, Path] = {}

    def before(self, call: str, path: Path) -> None:
        """Do what this stand-in is for; `self.num_calls` is the index of this call."""

    def _count(self, call: str, path: Path) -> None:
        with self._lock:  # a save in the background has several threads
            self.before(call, path)
            self.num_calls += 1

    def open(self, path: Path, flags: int) -> int:
        self._count("create" if flags & os.O_CREAT else "open", path)
        with self._lock:
            descriptor = super().open(path, flags)
            self._paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        self._count("write", self._paths[descriptor])
        return super().write(descriptor, data)

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        self._count("write", self._paths[descriptor])
        return super().write_at(descriptor, data, offset)

    def read(self, descriptor: int, num_bytes: int) -> bytes:
        self._count("read", self._paths[descriptor])
        return super().read(descriptor, num_bytes)

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._count("read", self._paths[descriptor])
        return super().read_into(descriptor, buffer, offset)

    def fsync(self, descriptor: int) -> None:
        self._count("fsync", self._paths[descriptor])

    def close(self, descriptor: int) -> None:
        # The descriptor goes in any case, as in Linux: a close that fails has closed.
        with self._lock:  # or another thread opens a file of this number in between
            super().close(descriptor)
            path = self._paths.pop(descriptor)
        self._count("close", path)

    def mkdir(self, path: Path, mode: int) -> None:
        self._count("mkdir", path)
        super().mkdir(path, mode)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", source)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count("unlink", path)
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._count("rmdir", path)
        super().rmdir(path)


class Failing(Watched):
    """Fail with `number` at call `at`, once or for ever after."""

    def __init__(self, at: int, number: int, *, for_ever: bool = False) -> None:
        super().__init__()
        self._at, self._number, self._for_ever = at, number, for_ever
        self.failed: list[tuple[str, Path]] = []

    def before(self, call: str, path: Path) -> None:
        if self.num_calls == self._at or (self._for_ever and self.num_calls > self._at):
            self.failed.append((call, path))
            self.num_calls += 1
            raise OSError(self._number, os.strerror(self._number), str(path))


class Killed(Watched):
    """Die by SIGKILL at call `at`: before it, or, if `torn`, with a write half done."""

    def __init__(self, at: int, *, torn: bool) -> None:
        super().__init__()
        self._at, self._torn = at, torn

    def before(self, call: str, path: Path) -> None:
        if self.num_calls == self._at and not (self._torn and call == "write"):
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self._torn and self.num_calls == self._at:
            os.write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(descriptor, data)

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self._torn and self.num_calls == self._at:
            os.pwrite(descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_at(descriptor, data, offset)


def write_payload(tag: str) -> Callable[[Path], None]:
    """Return a `write` for `save`: a durable file, and two that nobody has fsynced, one in a subdirectory."""

    def write(directory: Path) -> None:
        files.write_bytes_durably(directory / "weights.safetensors", f"weights {tag}".encode() * 40)
        files.system.mkdir(directory / "deep", 0o777)
        for name, data in (("deep/moments", f"moments {tag}" * 30), ("plain", f"plain {tag}" * 20)):
            descriptor = files.system.open(directory / name, os.O_WRONLY | os.O_CREAT)
            files.system.write(descriptor, memoryview(data.encode()))
            files.system.close(descriptor)

    return write


def put(root: Path, step: int, tag: str, *, keep_last: int = 9) -> Path:
    """Save the payload of a tag as the checkpoint of a step."""
    return save.save(root, step=step, write=write_payload(tag), meta={"tag": tag}, keep_last=keep_last)


def put_behind(root: Path, step: int, tag: str, *, keep_last: int = 9, buffer_bytes: int = 1) -> Path:
    """Save the same files in the background, one chunk at a time if there is room for no more."""
    large = [
        LargeFile("weights.safetensors", f"weights {tag}".encode() * 40, ()),
        LargeFile("deep/moments", f"moments {tag}".encode() * 30, ()),
    ]

    def rest(directory: Path) -> None:
        files.write_bytes_durably(directory / "plain", f"plain {tag}".encode() * 20)

    saver = Saver(root, ChunkWriter(buffer_bytes, large))
    try:
        saver.begin(
            Wanted(step=step, files=large, write_rest=rest, meta={"tag": tag}, keep_last=keep_last), ()
        )
        return saver.result()
    finally:
        saver.close()


def newest(root: Path) -> tuple[int, str] | None:
    """Return step and tag of the newest whole checkpoint; nothing damaged may be in its way."""
    warnings: list[str] = []
    found = load.newest_whole(root, warn=warnings.append)
    assert warnings == []
    if found is None:
        return None
    path, manifest = found
    tag = manifest.meta["tag"]
    assert (path / "weights.safetensors").read_bytes() == f"weights {tag}".encode() * 40
    assert (path / "deep" / "moments").read_bytes() == f"moments {tag}".encode() * 30
    assert (path / "plain").read_bytes() == f"plain {tag}".encode() * 20
    return manifest.step, tag


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One save to be interrupted."""

    before: tuple[tuple[int, str], ...]
    """Steps and tags that are there."""
    new: tuple[int, str]
    """Step and tag to save."""
    keep_last: int
    """Steps to keep."""
    has_leftovers: bool = False
    """Whether two earlier crashes left something."""
    is_behind: bool = False
    """Whether it is saved in the background."""
    buffer_bytes: int = 1
    """Room for what is written in the background at once."""

    @property
    def old(self) -> tuple[int, str] | None:
        """Step and tag that a run resumes from until the new one is committed."""
        return self.before[-1] if self.before else None

    def prepare(self, root: Path) -> None:
        """Put there what is there before the save."""
        for step, tag in self.before:
            put(root, step, tag)
        if self.has_leftovers:
            for name in (".tmp-step-00000020-0123abcd", ".trash-step-00000001-0123abcd"):
                (root / name / "deep").mkdir(parents=True)
                (root / name / "deep" / "weights").write_bytes(b"half")
                (root / name / "MANIFEST.json").write_bytes(b"{")

    def run(self, root: Path) -> Path:
        """Save."""
        if self.is_behind:
            return put_behind(root, *self.new, keep_last=self.keep_last, buffer_bytes=self.buffer_bytes)
        return put(root, *self.new, keep_last=self.keep_last)

    def check_afterwards(self, root: Path) -> None:
        """Assert that the old or the new one is whole, and that the next save leaves nothing else behind."""
        assert newest(root) in (self.old, self.new)
        put(root, 40, "next", keep_last=1)
        assert newest(root) == (40, "next")
        assert [path.name for path in root.iterdir()] == ["step-00000040"]


SCENARIOS = {
    "first": Scenario(before=(), new=(10, "a"), keep_last=1),
    "only": Scenario(before=((10, "a"),), new=(20, "b"), keep_last=1),
    "retention": Scenario(
        before=((10, "a"), (20, "b"), (25, "c")), new=(30, "d"), keep_last=2, has_leftovers=True
    ),
    "again, equal": Scenario(before=((20, "b"),), new=(20, "b"), keep_last=1),
    "again, other": Scenario(before=((10, "a"), (20, "b")), new=(20, "c"), keep_last=1),
    "behind": Scenario(before=((10, "a"), (20, "b")), new=(30, "c"), keep_last=1, is_behind=True),
}
_RETENTION_BEHIND = replace(SCENARIOS["retention"], is_behind=True)
MORE_BEHIND = {
    "behind, first": replace(SCENARIOS["first"], is_behind=True),
    "behind, retention": _RETENTION_BEHIND,
    "behind, again": replace(SCENARIOS["again, other"], is_behind=True),
    "behind, in parallel": replace(SCENARIOS["behind"], buffer_bytes=1 << 20),
    "behind, retention, in parallel": replace(_RETENTION_BEHIND, buffer_bytes=1 << 20),
}
"""Further saves in the background, by one thread or by several, whose calls have another order each time."""
