"""The run directory and its files, for one run at a time.

Everything made in it is for this user only, and nothing in it is reached through a link; the directory itself
may be.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatrain.checkpoint.format import is_leftover, parse_directory_name
from megatrain.checkpoint.save import remove_leftovers
from megatrain.config import Config, dump_config
from megatrain.config.decided import as_settings
from megatrain.errors import OutputError, os_errors
from megatrain.files import make_directories, opened, system, temporary_of, write_bytes_durably
from megatrain.hardware import host_memory
from megatrain.hardware.accelerators import accelerator, check_accelerator, device_name
from megatrain.hardware.cores import allowed_cpus
from megatrain.train.records.lock import is_locked, lock, place_of
from megatrain.train.records.shareable import without_home
from megatrain.versions import versions_of

_log = logging.getLogger(__name__)

_OURS = {
    "config.yaml",
    "env.json",
    "plan.json",
    "metrics.jsonl",
    "metrics.damaged.jsonl",
    "experts.json",
    "events.jsonl",
    "report.html",
    "stacks.txt",
    "checkpoints",
    "hf",
}


class MovedError(OutputError):
    """The run directory is not where it was when the run began; what was to be written is elsewhere."""


class RunDirectory:
    """Paths of a run, and what may be written there."""

    def __init__(self, path: Path) -> None:
        """Name the directory; nothing is touched."""
        self._name(path)
        self._descriptor: int | None = None
        """The locked directory, whatever its path is."""
        self._begun: tuple[Config, Mapping[str, Any] | None] | None = None

    def _name(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "env.json"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.experts = path / "experts.json"
        self.events = path / "events.jsonl"
        self.report = path / "report.html"
        self.stacks = path / "stacks.txt"
        self.checkpoints = path / "checkpoints"
        self.model = path / "hf"

    @property
    def is_run(self) -> bool:
        """Return whether a run was begun here."""
        return self.config.is_file()

    def check(self) -> None:
        """Refuse a directory that is not ours to write.

        Raises:
            OutputError: The path is a file, cannot be written, holds something that no run made, or has a
                link in the place of a run's file.
        """
        with os_errors("use the run directory", self.path):
            if self.path.exists() and not self.path.is_dir():
                raise OutputError(
                    f"{self.path} is a file; give a directory for the run with out=DIR (--out DIR)"
                )
            existing = next(level for level in (self.path, *self.path.absolute().parents) if level.exists())
            if not os.access(existing, os.W_OK | os.X_OK):
                raise OutputError(
                    f"{existing} cannot be written; give another directory with out=DIR (--out DIR)"
                )
            if not self.path.is_dir():
                return
            names = sorted(name for name in os.listdir(self.path) if temporary_of(name) not in _OURS)
            if not self.is_run and names and not self._is_left_of_run(names):
                raise OutputError(
                    f"{self.path} is not empty and is not a run of megatrain (it holds {', '.join(names[:3])}"
                    f"{', ...' if len(names) > 3 else ''}); give a new directory with out=DIR (--out DIR)"
                )
            for path in (self.path / name for name in names if name in _OURS):
                if path.is_symlink():
                    raise OutputError(
                        f"{path} is a symbolic link, and links are not followed there; put the file itself "
                        "there, or make the whole run directory a link"
                    )

    def _is_left_of_run(self, names: Collection[str]) -> bool:
        """Return whether a directory without settings has a run's checkpoints, and nothing else."""
        if "checkpoints" not in names or not _OURS.issuperset(names) or not self.checkpoints.is_dir():
            return False
        inner = os.listdir(self.checkpoints)
        return bool(inner) and all(is_leftover(name) or parse_directory_name(name) for name in inner)

    def write_stacks(self, rank: int | None = None) -> str:
        """Write where each thread of this process stands, and say so.

        Args:
            rank: The number of this process among several that train together; None: it is the only one.

        Raises:
            OSError: The file cannot be written.
        """
        path = self.stacks if rank is None else self.stacks.with_stem(f"{self.stacks.stem}-{rank}")
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return f"{path} says where each thread stands"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for one run; the lock ends with the process, however it ends.

        Raises:
            OutputError: Another process trains here, or the directory cannot be used.
        """
        with os_errors("use the run directory", self.path):
            was_there = self.path.exists()
        try:
            self._open(self.path)
            yield
        finally:
            self._close()
            if not was_there:
                with suppress(OSError):  # one of the errors is that it has files of the run
                    self.path.rmdir()

    def _open(self, path: Path) -> None:
        """Make a directory where there is none, and lock it in the place of the one before."""
        make_directories(path)
        with os_errors("use the run directory", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            lock(descriptor, path, self.in_use)
        except BaseException:
            os.close(descriptor)
            raise
        self._close()
        self._descriptor = descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # nothing was written through it
                os.close(self._descriptor)
        self._descriptor = None

    @property
    def is_in_use(self) -> bool:
        """Return whether a process trains here, or the directory cannot be opened."""
        return is_locked(self.path)

    def in_use(self) -> OutputError:
        """Return the error of a second run in the directory."""
        return OutputError(
            f"{self.path} is in use by another run; wait for it, or give another directory with --out"
        )

    @contextmanager
    def found(self) -> Iterator[None]:
        """Let the body write into the directory wherever it is now, and end the run where it was taken away.

        A directory that was moved is written where it is. One that was removed is made again, under another
        name if something else has its name now. The paths of this object lead there. Settings that were
        removed are written again.

        Raises:
            MovedError: The directory is not in its place; the body has written what it wanted.
            OutputError: The directory cannot be looked at, or none can be made.
        """
        if self.is_in_place():
            if self._begun is not None and not self.is_run:
                _log.warning("%s was removed; it is written again", self.config)
                self.begin(*self._begun)
            yield
            return
        said = self._follow()
        yield
        raise MovedError(said)

    def is_in_place(self) -> bool:
        """Return whether the path leads to the directory that is locked."""
        assert self._descriptor is not None, "the directory is not locked"
        with os_errors("find the run directory", self.path):
            try:
                return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
            except (FileNotFoundError, NotADirectoryError):
                return False

    def _follow(self) -> str:
        """Go to where the directory is now, or make another one; return what the user is told of it."""
        assert self._descriptor is not None, "the directory is not locked"
        before, place = self.path, place_of(self._descriptor)
        if place is not None:
            self._name(place)
            return (
                f"{before} was moved to {place} while the run trained, which is saved there and has ended; "
                f"the same command goes on with --out {place}"
            )
        place, tries = before, 1
        while os.path.lexists(place):
            tries += 1
            place = before.with_name(f"{before.name}-{tries}")
        self._open(place)
        self._name(place)
        if self._begun is not None:
            self.begin(*self._begun)
        if place == before:
            return (
                f"{before} was removed while the run trained; it was made again, the run is saved there and "
                "has ended, and the same command goes on"
            )
        return (
            f"{before} was replaced by something else while the run trained; the run is saved in {place} and "
            f"has ended, and the same command goes on with --out {place}"
        )

    def remove_leftovers(self) -> None:
        """Remove files and checkpoints that a crash left half-written.

        Raises:
            OutputError: Something cannot be removed.
        """
        with os_errors("remove what a crash has left in", self.path):
            for name in os.listdir(self.path):
                if temporary_of(name) in _OURS:
                    system.unlink(self.path / name)
        remove_leftovers(self.checkpoints)

    def begin(self, config: Config, plan: Mapping[str, Any] | None = None) -> None:
        """Write the settings, the environment and the plan; an older plan is removed.

        Args:
            config: The settings, in which nothing is open.
            plan: The plan as plain values; None if there is none.
        """
        self._begun = config, plan
        write_bytes_durably(self.config, dump_config(as_settings(config)).encode())
        write_bytes_durably(self.environment, (json.dumps(environment(), indent=2) + "\n").encode())
        if plan is not None:
            write_bytes_durably(self.plan, (json.dumps(without_home(plan)) + "\n").encode())
        else:
            with os_errors("remove", self.plan), suppress(FileNotFoundError):
                system.unlink(self.plan)


def environment() -> dict[str, Any]:
    """Describe this machine and the versions in use: no names of users or hosts, and no command line."""
    import torch

    packages = (
        "megatrain",
        "torch",
        "transformers",
        "datasets",
        "safetensors",
        "tokenizers",
        "numba",
        "numpy",
    )
    memory, kind = host_memory(), accelerator()
    return {
        "versions": versions_of(packages),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(allowed_cpus()),
        "torch_threads": torch.get_num_threads(),
        "host_available_bytes": memory.available_bytes,
        "host_limit": memory.source,
        "gpu": None if kind is None else device_name(check_accelerator(kind)),
    }
