"""The run directory and its files, for one run at a time.

Everything made in it is for this user only, and nothing in it is reached through a link; the directory itself
may be.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatrain.checkpoint.save import remove_leftovers
from megatrain.config import Config, dump_config
from megatrain.config.decided import as_settings
from megatrain.errors import OutputError, os_errors
from megatrain.files import make_directories, system, temporary_of, write_bytes_durably
from megatrain.hardware import host_memory
from megatrain.hardware.accelerators import accelerator, check_accelerator, device_name
from megatrain.hardware.cores import allowed_cpus
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
    "checkpoints",
    "hf",
}


_LOCK_TRIES = 5
_LOCK_WAIT_S = 0.02
"""The pause between two tries, since a check by `is_in_use` holds the lock for microseconds."""


class RunDirectory:
    """Paths of a run, and what may be written there."""

    def __init__(self, path: Path) -> None:
        """Name the directory; nothing is touched."""
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "env.json"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.experts = path / "experts.json"
        self.events = path / "events.jsonl"
        self.report = path / "report.html"
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
            if not self.is_run and names:
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

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for one run; the lock ends with the process, however it ends.

        Raises:
            OutputError: Another process trains here, or the directory cannot be used.
        """
        with os_errors("use the run directory", self.path):
            was_there = self.path.exists()
        try:
            make_directories(self.path)
            with os_errors("use the run directory", self.path):
                descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os_errors("lock the run directory", self.path):
                    self._lock(descriptor)
                yield
            finally:
                with suppress(OSError):  # nothing was written through it
                    os.close(descriptor)
        finally:
            if not was_there:
                with suppress(OSError):  # one of the errors is that it has files of the run
                    self.path.rmdir()

    @property
    def is_in_use(self) -> bool:
        """Return whether a process trains here, or whether that cannot be told."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two checks disturb none
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def in_use(self) -> OutputError:
        """Return the error of a second run in the directory."""
        return OutputError(
            f"{self.path} is in use by another run; wait for it, or give another directory with --out"
        )

    def _lock(self, descriptor: int) -> None:
        for tries_left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if not tries_left:
                    raise self.in_use() from error
                time.sleep(_LOCK_WAIT_S)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
                _log.warning("the filesystem of %s has no locks: begin no other run in it", self.path)
                return

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
