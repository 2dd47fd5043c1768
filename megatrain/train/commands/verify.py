"""`megatrain verify` reads everything that a run, a checkpoint or a model directory has, and names damage."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.format import MANIFEST_NAME, FormatError, Manifest
from megatrain.checkpoint.load import DamagedError, find, verify
from megatrain.config import Config, load_config
from megatrain.config.sizes import counted
from megatrain.errors import CheckpointError, MegatrainError, os_sentence
from megatrain.model.adapters.files import WEIGHTS_NAME, is_adapter
from megatrain.model.weights.files import checkpoint_files, has_weights
from megatrain.model.weights.verification import verify_model
from megatrain.store.drives.record import PREPARED_NAME, RECORD_NAME, read_record
from megatrain.store.drives.verification import verify_committed
from megatrain.train.outputs.export import compare_exported, is_exported
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.metrics import format_bytes
from megatrain.train.resume.state_commits import tiers_of
from megatrain.train.resume_point import left_by


@dataclass(frozen=True, slots=True)
class Verified:
    """One thing that was read."""

    name: str
    """Its path."""
    text: str
    """What was found."""
    is_sound: bool


def verify_path(path: Path, progress: Callable[[str], None] = lambda doing: None) -> Iterator[Verified]:
    """Read all of a run (its checkpoints, `hf/`, what is committed on drives), a checkpoint or a model.

    Args:
        path: The directory of one of them, or one of several checkpoints.
        progress: The function that is told what is read at this moment.

    Raises:
        CheckpointError: The directory is none of these.
        ConfigError: The settings of the run cannot be read.
    """
    directory = RunDirectory(path)
    if (path / MANIFEST_NAME).exists():
        yield _checkpoint(path, progress)[0]
    elif directory.is_run:
        yield from _run(directory, load_config(directory.config), progress)
    elif checkpoints := [*find(path), *find(directory.checkpoints)]:
        yield from (_checkpoint(each, progress)[0] for each in checkpoints)
    elif path.is_dir() and (has_weights(path) or is_adapter(path)):
        yield _model(path, progress)
    else:
        raise CheckpointError(
            f"{path} is no run, no checkpoint and no model directory; give a directory that train wrote, one "
            f"of its checkpoints/step-*, or one with safetensors files"
        )


def _run(directory: RunDirectory, config: Config, progress: Callable[[str], None]) -> Iterator[Verified]:
    whole: list[Manifest] = []
    for path in find(directory.checkpoints):
        found, manifest = _checkpoint(path, progress)
        if manifest is not None:
            whole.append(manifest)
        yield found
    yield from _committed(config, progress)
    if directory.model.exists():
        yield _exported(directory, config, whole, progress)


def _checkpoint(path: Path, progress: Callable[[str], None]) -> tuple[Verified, Manifest | None]:
    try:
        manifest = verify(path, passed=_Passed(path, progress))
    except DamagedError as error:
        if not path.exists():
            return Verified(str(path), "was removed meanwhile, by the run that goes on", True), None
        return Verified(str(path), f"damaged: {error.reason}", False), None
    except CheckpointError as error:
        return Verified(str(path), str(error), False), None
    size = format_bytes(sum(entry.num_bytes for entry in manifest.files))
    text = f"whole: step {manifest.step:,}, {counted(len(manifest.files), 'file')}, {size}"
    return Verified(str(path), text, True), manifest


def _committed(config: Config, progress: Callable[[str], None]) -> Iterator[Verified]:
    """Read what is committed on the drives, that of every node that has its directories here."""
    tiers = tiers_of(config)
    if tiers is None:
        return
    nodes = [tiers.nvme]
    node = 0
    while (own := tiers.of_node(node, 2))[0].is_dir():
        nodes.append(own)
        node += 1
    for directories in nodes:
        for name in (RECORD_NAME, PREPARED_NAME):
            where = directories[0] / name
            try:
                record = read_record(directories[0], name)
                if record is None:
                    continue
                if record.owner != tiers.owner:
                    yield Verified(str(where), f"is of another run ({record.owner}); it was not read", True)
                    continue
                num_bytes = verify_committed(directories, record, _Passed(where, progress))
            except MegatrainError as error:
                yield Verified(str(where), str(error), False)
                continue
            text = f"whole: step {record.step:,} on {counted(len(directories), 'drive')}"
            yield Verified(str(where), f"{text}, {format_bytes(num_bytes)}", True)


def _exported(
    directory: RunDirectory, config: Config, whole: list[Manifest], progress: Callable[[str], None]
) -> Verified:
    """Compare the exported model with the checkpoints, where one of them has its digests."""
    model, name = directory.model, str(directory.model)
    progress(f"reading {model}")
    for manifest in whole:
        if is_exported(manifest, model):
            return Verified(name, f"whole: the model of step {manifest.step:,}, byte for byte", True)
    left = left_by(directory, config, whole[0]) if whole else None
    if left is None:
        return _model(model, progress, " and that it is of none of the checkpoints that are here")
    try:
        compare_exported(left, model)
        reason = "it has changed while it was read"
    except FormatError as error:
        reason = str(error)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR) and error.filename
        reason = f"{Path(error.filename).name} is missing" if missing else os_sentence("read", name, error)
    text = f"it is not the model of step {left.step:,}: {reason}; the run's own command writes it anew"
    return Verified(name, f"damaged: {text}", False)


def _model(path: Path, progress: Callable[[str], None], also: str = "") -> Verified:
    try:
        files = checkpoint_files(path) if has_weights(path) else [path / WEIGHTS_NAME]
        found = verify_model(path, files, _Passed(path, progress))
    except MegatrainError as error:
        return Verified(str(path), f"damaged: {error}", False)
    return Verified(
        str(path),
        f"sound: {counted(found.num_files, 'file')} with {counted(found.num_tensors, 'tensor')}, "
        f"{format_bytes(found.num_bytes)}; headers, sizes and index agree, and all values are finite. It has "
        f"no digests{also}, so a finite value that has changed is not seen",
        True,
    )


class _Passed:
    """Counts the bytes that were read, and reports them."""

    def __init__(self, path: Path, progress: Callable[[str], None]) -> None:
        self._path, self._progress, self._num_bytes = path, progress, 0
        progress(f"reading {path}")

    def __call__(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._progress(f"reading {self._path}, {format_bytes(self._num_bytes)} so far")
