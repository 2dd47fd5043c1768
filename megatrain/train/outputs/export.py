"""Export copies the model of a checkpoint somewhere else without building it.

An exported directory always holds the bytes that the checkpoint's manifest names, and is whole or absent.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial as partial_of
from pathlib import Path
from typing import Any

from megatrain.checkpoint.comparison import check_size, compare
from megatrain.checkpoint.format import FileEntry, FormatError, Manifest
from megatrain.checkpoint.load import find_step, newest_whole, verify
from megatrain.config.reading import read_config
from megatrain.errors import CheckpointError, ConfigError, OutputError, os_errors
from megatrain.files import (
    copy_file_durably,
    fsync_directory,
    make_directories,
    make_private_directory,
    remove_tree,
    rename,
    write_bytes_durably,
)
from megatrain.model.adapters.files import CONFIG_NAME, encode_config
from megatrain.train.records.shareable import without_home
from megatrain.train.report.card import model_card

_log = logging.getLogger(__name__)

_STATE = "state/"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", CONFIG_NAME)
"""The files that are written anew where weights are not copied."""

SHARD_BYTES = 5 * 10**9
"""The size from which the weights of a model that is written anew are split."""


def newest_model(run: Path) -> Path:
    """Return the checkpoint with the model that a run leaves if it ends now: the newest whole or the best.

    Raises:
        CheckpointError: There is no run, or it has no whole checkpoint.
    """
    with os_errors("read", run, CheckpointError):
        if not (run / "checkpoints").is_dir():
            raise CheckpointError(
                f"{run} is not a run directory with checkpoints; give the directory that train wrote"
            )
    found = newest_whole(run / "checkpoints", warn=_log.warning)
    if found is None:
        raise CheckpointError(
            f"{run} has no checkpoint yet; let the run reach its first one (checkpoint.every)"
        )
    path, newest = found
    loads_best = bool(newest.meta.get("config", {}).get("eval", {}).get("load_best"))
    best = best_step(newest.meta, loads_best=loads_best)
    return path if best is None else find_best(run / "checkpoints", best)


def best_step(meta: Mapping[str, Any], *, loads_best: bool) -> int | None:
    """Return the step whose model the run leaves in place of the last one, or None for the last one.

    Args:
        meta: The record of a checkpoint's manifest.
        loads_best: The setting `eval.load_best`.
    """
    step = meta.get("evaluation", {}).get("best_step")
    return int(step) if loads_best and step is not None else None


def find_best(checkpoints: Path, step: int) -> Path:
    """Return the kept checkpoint of the best step.

    Raises:
        CheckpointError: The checkpoint is gone.
    """
    path = find_step(checkpoints, step)
    if path is not None:
        return path
    raise CheckpointError(
        f"{checkpoints} has no checkpoint of step {step}, the best one; put it back, or use "
        "eval.load_best=false to leave the last model in hf/"
    )


def export_run(
    run: Path,
    out: Path,
    *,
    merges: bool = False,
    max_shard_bytes: int | None = None,
    quantised: str | None = None,
) -> None:
    """Write the model of a run, or its adapters, into a new or empty directory.

    Args:
        run: The run directory, for its newest (with `eval.load_best`, best) checkpoint, or a checkpoint.
        out: The directory for the model.
        merges: Whether to write the base with the adapters merged into it, in the types of the base.
        max_shard_bytes: The size from which the weights are split; None means 5 GB, or as they are.
        quantised: The format of the checkpoint that the run began with, in which to write the model; None:
            it is not quantised.

    Raises:
        CheckpointError: There is no whole checkpoint.
        ConfigError: The run to merge has no adapters, adapters are to be split or quantised, or the
            checkpoint is in another format.
        OutputError: `out` is not empty or cannot be written; nothing is left half-written.
        ModelError: The base of the adapters cannot be read.
    """
    source = newest_model(run) if (run / "checkpoints").is_dir() else _checkpoint(run)
    run = source.parents[1]
    has_adapters = (source / CONFIG_NAME).is_file()
    if merges and not has_adapters:
        raise ConfigError(f"{run} has trained the whole model, which has nothing to merge; leave --merge out")
    if max_shard_bytes is not None and has_adapters and not merges:
        raise ConfigError("adapters are one file; --max-shard-size is for models: add --merge, or drop it")
    if quantised is not None:
        require_writable(quantised, is_model=merges or not has_adapters, is_split=max_shard_bytes is not None)
    with os_errors("use", out):
        if out.is_symlink():
            raise OutputError(f"{out} is a symbolic link; give a new directory")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OutputError(f"{out} is not an empty directory; give a new one")
        if out.absolute().is_relative_to(run.absolute()):
            raise OutputError(f"{out} is inside the run directory {run}; give a place outside of it")
        if not out.absolute().parent.is_dir():
            make_directories(out.absolute().parent)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    write: Callable[[Path, Path], None] | None = _write_shareable if has_adapters else None
    anew: Sequence[str] = (CONFIG_NAME,) if has_adapters else ()
    if merges or max_shard_bytes is not None:
        from megatrain.model.adapters.merge import write_model_of

        size, scaling = max_shard_bytes or SHARD_BYTES, _model_settings(source).get("rope_scaling")
        write, anew = partial_of(write_model_of, max_shard_bytes=size, rope_scaling=scaling), _WEIGHTS
    if quantised is not None:
        write, anew = partial_of(_write_quantised, method=quantised, make=write), _WEIGHTS
    export_model(source, out, partial, card=model_card(run, is_merged=merges), write=write, anew=anew)


def require_writable(method: str, *, is_model: bool, is_split: bool) -> None:
    """Refuse to write in a format that is none, or what has no such format.

    Raises:
        ConfigError: The sentence says what.
    """
    from megatrain.model.weights.requantise import WRITTEN

    if method not in WRITTEN:
        raise ConfigError(
            f"--format {method} is not written; use {' or '.join(WRITTEN)}, or leave it out (bf16)"
        )
    if not is_model:
        raise ConfigError("adapters are not quantised; add --merge, or leave --format out")
    if is_split:
        raise ConfigError("--format writes the files of the checkpoint; leave --max-shard-size out")


def _write_quantised(
    source: Path, out: Path, *, method: str, make: Callable[[Path, Path], None] | None
) -> None:
    """Write a model as the quantised checkpoint that it began with has it.

    Args:
        source: The checkpoint of the run.
        out: The directory for the model.
        method: The format.
        make: The function that makes the model of the source; None: it is there.
    """
    from megatrain.model.weights.files import model_directory
    from megatrain.model.weights.requantise import write_like

    place = str(_model_settings(source)["path"])
    checkpoint, trained = model_directory(place), source
    if make is not None:
        trained = out / ".whole"
        make_private_directory(trained)
        make(source, trained)
    write_like(checkpoint, trained, out, method)
    if make is not None:
        shutil.rmtree(trained)


def _model_settings(source: Path) -> Mapping[str, Any]:
    """Return what the settings of a run say of the model that it began with."""
    settings = source.parents[1] / "config.yaml"
    saved = read_config(settings) if settings.exists() else verify(source, digests=False).meta["config"]
    model: Mapping[str, Any] = saved["model"]
    return model


def _write_shareable(source: Path, out: Path) -> None:
    """Write the configuration of adapters, with a base named without this user's home directory."""
    config = json.loads((source / CONFIG_NAME).read_bytes())
    base = config["base_model_name_or_path"]
    named = without_home(base)
    if named != base:
        _log.warning(
            "%s names the base as %s, for others: write there what they know it by, or give it to PEFT",
            CONFIG_NAME,
            named,
        )
    encoded = encode_config(config | {"base_model_name_or_path": named})
    write_bytes_durably(out / CONFIG_NAME, encoded)


def _checkpoint(path: Path) -> Path:
    """Return a checkpoint that is whole; any other path is refused as a run without any."""
    if path.parent.name != "checkpoints":
        return newest_model(path)
    verify(path)
    return path.absolute()


def export_model(
    source: Path,
    out: Path,
    partial: Path,
    *,
    card: str,
    write: Callable[[Path, Path], None] | None = None,
    anew: Sequence[str] = (),
) -> None:
    """Copy the model files of a whole checkpoint beside `out`, to `partial`, and then into its place.

    Old files in either place are removed; `out` is the old model, or none, until the new one is whole.

    Args:
        source: The checkpoint.
        out: The directory for the model.
        partial: The temporary place beside `out`.
        card: The text of the model card, its `README.md`.
        write: The function that writes files of `source` to a directory in another form; None copies all.
        anew: The patterns of the names of files that are then not copied.

    Raises:
        OutputError: A file cannot be written.
        CheckpointError: The checkpoint is no longer whole.
    """
    manifest = verify(source, digests=False)
    with os_errors("use", out):
        is_there, is_left = out.exists(), partial.exists()
    if is_left:
        remove_tree(partial, first="config.json")
    try:
        make_private_directory(partial)
        if write is not None:
            write(source, partial)
        for entry in _model_files(manifest):
            if any(fnmatch(entry.name, pattern) for pattern in anew):
                continue
            target = partial / entry.name
            if not target.parent.exists():
                make_directories(target.parent)
            copy_file_durably(source / entry.name, target)
        write_bytes_durably(partial / "README.md", card.encode())
        fsync_directory(partial)
        if is_there:
            remove_tree(out, first="config.json")
        rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_directory(out.absolute().parent)


def compare_exported(
    manifest: Manifest, out: Path, passed: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Compare a directory with the model files of a checkpoint, byte for byte; others may be there too.

    Args:
        manifest: The manifest of the checkpoint.
        out: The directory.
        passed: Called with the number of bytes that were found right, again and again.

    Raises:
        FormatError: A file has another size, or other bytes; the error names it.
        OSError: A file is missing, or cannot be read.
    """
    model = replace(manifest, files=tuple(_model_files(manifest)))
    for entry in model.files:
        check_size(out, entry)
    compare(out, model, passed)


def is_exported(manifest: Manifest, out: Path) -> bool:
    """Return whether a directory has every model file of a checkpoint, byte for byte."""
    try:
        compare_exported(manifest, out)
    except (FormatError, FileNotFoundError, NotADirectoryError):
        return False
    return True


def _model_files(manifest: Manifest) -> list[FileEntry]:
    return [entry for entry in manifest.files if not entry.name.startswith(_STATE)]
