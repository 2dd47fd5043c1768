"""The point from which a run resumes, and the check whether anything is left to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megatrain.checkpoint.format import MANIFEST_NAME, Manifest
from megatrain.checkpoint.load import find, newest_whole, verify
from megatrain.config import Config
from megatrain.errors import CheckpointError, OutputError, os_errors
from megatrain.train.evaluate.best_tracker import BestTracker
from megatrain.train.outputs.export import best_step, find_best, is_exported
from megatrain.train.records.directory import RunDirectory
from megatrain.train.resume.point import ResumePoint
from megatrain.train.resume.record import require_record
from megatrain.train.resume.state_commits import find_commit
from megatrain.train.shards import decided_shards

_log = logging.getLogger(__name__)


def find_checkpoint(
    directory: RunDirectory,
    resume: str,
    *,
    digests: bool = True,
    is_later: Callable[[str], bool] = lambda name: False,
    damaged: Mapping[Path, str] = MappingProxyType({}),
    warn: Callable[[str], None] = _log.warning,
) -> tuple[Path, Manifest] | None:
    """Find the checkpoint to resume from: its path and manifest, or None to begin anew.

    Args:
        directory: The directory of the run.
        resume: The wish: `auto`, `no`, or the path of a checkpoint.
        digests: Whether digests are checked, as in `verify`; else damaged checkpoints are skipped silently.
        is_later: Says of the name of a file whether it is compared later, as in `verify`.
        damaged: The checkpoints that were found damaged as they were loaded, as in `newest_whole`.
        warn: Called with one sentence for each damaged checkpoint that is passed over.

    Raises:
        CheckpointError: The named checkpoint is damaged, or is a directory of several, none of the run's
            checkpoints is whole, or what is found has no record of a run.
        OutputError: The wish is `no`, and the directory holds a run.
    """
    if resume == "no":
        if directory.is_run or find(directory.checkpoints):
            raise OutputError(
                f"{directory.path} holds a run already; give a new directory with --out, or use --resume auto"
            )
        return None
    if resume == "auto":
        found = newest_whole(
            directory.checkpoints,
            warn=warn if digests else _log.debug,
            digests=digests,
            is_later=is_later,
            damaged=damaged,
        )
        if found is not None:
            require_record(found[1].meta, found[0])
        return found
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory; give one of checkpoints/step-*")
    if not (path / MANIFEST_NAME).exists() and (
        within := [*find(RunDirectory(path).checkpoints), *find(path)]
    ):
        raise CheckpointError(
            f"{path} is no checkpoint but holds some; give one of them, such as {within[0]}"
        )
    later = [other for other in find(directory.checkpoints) if other.name > path.name]
    if later and path.absolute().parent == directory.checkpoints.absolute():
        raise CheckpointError(
            f"{directory.path} has gone on to {later[0].name}, so it cannot go back to {path.name}; "
            "give another directory with --out, or remove the later checkpoints"
        )
    manifest = verify(path, digests=digests, is_later=is_later)
    require_record(manifest.meta, path)
    return path, manifest


def point_of(
    config: Config,
    directory: RunDirectory,
    found: tuple[Path, Manifest] | None,
    held: Sequence[Sequence[int]],
) -> ResumePoint:
    """Return the point from which a run resumes, for which a commit on its drives may be newest.

    Args:
        config: The settings of the run.
        directory: The directory of the run.
        found: The result of `find_checkpoint`.
        held: The steps on the drives of every node, as in `find_commit`; empty if drives are not looked at.

    Raises:
        CheckpointError: `find_commit` raises it.
    """
    path, saved, step = (None, None, -1) if found is None else (found[0], found[1].meta, found[1].step)
    commit = find_commit(config, is_run=directory.is_run, held=held, saved=step) if held else None
    if commit is not None:
        require_record(commit.meta, "the drives")
    return ResumePoint(checkpoint=path, saved=saved, committed=None if commit is None else commit.meta)


def check_start(config: Config, num_ranks: int) -> None:
    """Refuse what every rank would refuse once it has started; nothing is written.

    Raises:
        OutputError: The run directory is in use, or cannot be used.
        CheckpointError: `find_checkpoint` raises it.
        ConfigError: `decided_shards` raises it.
    """
    directory = RunDirectory(Path(config.out))
    directory.check()
    if directory.path.is_dir() and directory.is_in_use:
        raise directory.in_use()
    found = find_checkpoint(directory, config.checkpoint.resume, digests=False)
    decided_shards(config, num_ranks, None if found is None else found[1].meta)


def is_finished(directory: RunDirectory, config: Config, newest: Manifest) -> bool:
    """Return whether the run has ended, and `hf/` holds its final model, byte for byte."""
    left = left_by(directory, config, newest)
    if left is None:
        return False
    with os_errors("read", directory.model):
        if not directory.model.exists():
            return False
        if is_exported(left, directory.model):
            return True
    _log.warning("%s is not the model of step %d; it is written anew", directory.model, left.step)
    return False


def left_by(directory: RunDirectory, config: Config, newest: Manifest) -> Manifest | None:
    """Return the manifest of the checkpoint whose model a run that has ended leaves; None: it goes on.

    Raises:
        CheckpointError: The checkpoint of the best step is gone or damaged.
    """
    if not _has_ended(config, newest):
        return None
    best = best_step(newest.meta, loads_best=config.eval.load_best)
    return newest if best is None else verify(find_best(directory.checkpoints, best), digests=False)


def _has_ended(config: Config, newest: Manifest) -> bool:
    """Return whether the newest checkpoint is the last one with these settings, by step or early stop."""
    meta, train = newest.meta, config.train
    saved = meta["config"]
    if (
        meta.get("evaluation", {}).get("has_stopped")
        and saved["eval"].get("patience") == config.eval.patience
    ):
        return True
    if train.steps is not None:
        return newest.step >= train.steps
    return bool(meta.get("is_last")) and saved["train"].get("epochs") == train.epochs


def choose_best_anew(tracker: BestTracker, checkpoints: Path) -> None:
    """Forget the best step of another run, whose checkpoints stay with it."""
    if tracker.best_step is not None:
        _log.warning(
            "the best step so far, %d with a loss of %.4g, stays in %s; the best of this run is chosen anew",
            tracker.best_step,
            tracker.best_loss,
            checkpoints,
        )
    tracker.forget_best()
