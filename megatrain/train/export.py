"""Writes the model of a run's newest checkpoint somewhere else, without building it."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from megatrain.checkpoint.files import fsync_directory, fsync_file, make_directories, output_errors
from megatrain.checkpoint.load import newest_whole
from megatrain.errors import CheckpointError, OutputError

_log = logging.getLogger(__name__)

_NOT_MODEL = {"MANIFEST.json", "state"}


def newest_model(run: Path) -> Path:
    """Return the Hugging Face model directory of a run's newest whole checkpoint.

    Raises:
        CheckpointError: There is no run, or it has no whole checkpoint.
    """
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(
            f"{run} is not a run directory with checkpoints; give the directory that train wrote"
        )
    found = newest_whole(run / "checkpoints", warn=_log.warning)
    if found is None:
        raise CheckpointError(
            f"{run} has no checkpoint yet; let the run reach its first one (checkpoint.every)"
        )
    return found[0]


def export_run(run: Path, out: Path) -> None:
    """Copy the model files of a run's newest checkpoint into a new or empty directory.

    Raises:
        CheckpointError: There is no whole checkpoint.
        OutputError: `out` is not empty or cannot be written; nothing is left half-written.
    """
    source = newest_model(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} is not an empty directory; give a new one")
    if out.absolute().is_relative_to(run.absolute()):
        raise OutputError(f"{out} is inside the run directory {run}; give a place outside of it")
    make_directories(out.absolute().parent)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    with output_errors("write", out):
        try:
            partial.mkdir()
            for file in sorted(source.iterdir()):
                if file.name not in _NOT_MODEL and file.is_file():
                    shutil.copyfile(file, partial / file.name)
                    fsync_file(partial / file.name)
            fsync_directory(partial)
            if out.is_dir():
                out.rmdir()
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    fsync_directory(out.absolute().parent)
