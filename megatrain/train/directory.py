"""The run directory: `config.yaml env.json metrics.jsonl checkpoints/ hf/`, and one run in it at a time."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from megatrain.checkpoint.files import make_directories, write_bytes_durably
from megatrain.config import Config, dump_config
from megatrain.errors import OutputError
from megatrain.hardware import host_memory

_OURS = {"config.yaml", "env.json", "metrics.jsonl", "checkpoints", "hf"}


class RunDirectory:
    """Paths of a run, and what may be written there."""

    def __init__(self, path: Path) -> None:
        """Name the directory; nothing is touched."""
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "env.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "hf"

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.is_file()

    def check(self) -> None:
        """Refuse a directory that is not ours to write.

        Raises:
            OutputError: It is a file, cannot be written, or holds something that no run of ours made.
        """
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path} is a file; give a directory for the run with out=DIR (--out DIR)")
        existing = next(level for level in (self.path, *self.path.absolute().parents) if level.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OutputError(
                f"{existing} cannot be written; give another directory with out=DIR (--out DIR)"
            )
        if not self.path.is_dir() or self.is_run:
            return
        names = sorted(entry.name for entry in self.path.iterdir())
        foreign = [name for name in names if name not in _OURS]
        if foreign or names:
            raise OutputError(
                f"{self.path} is not empty and is not a run of megatrain (it holds {', '.join(names[:3])}"
                f"{', ...' if len(names) > 3 else ''}); give a new directory with out=DIR (--out DIR)"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for one run; the lock ends with the process, however it ends.

        Raises:
            OutputError: Another process trains here.
        """
        was_there = self.path.exists()
        make_directories(self.path)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OutputError(
                    f"{self.path} is in use by another run; wait for it, or give another directory with --out"
                ) from error
            except OSError:  # file systems without locks
                pass
            yield
        finally:
            os.close(descriptor)
            if not was_there and not any(self.path.iterdir()):
                self.path.rmdir()  # nothing came of the run

    def begin(self, config: Config) -> None:
        """Write what was asked for and where it runs."""
        write_bytes_durably(self.config, dump_config(config).encode())
        write_bytes_durably(self.environment, (json.dumps(environment(), indent=2) + "\n").encode())


def environment() -> dict[str, Any]:
    """Describe this machine and the versions in use; no names of users or hosts."""
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
    memory = host_memory()
    return {
        "versions": {name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "host_available_bytes": memory.available_bytes,
        "host_limit": memory.source,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "arguments": sys.argv[1:],
    }
