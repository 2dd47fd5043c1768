"""The beginning of a run: from the newest checkpoint that is found whole as it is loaded.

The large files of a checkpoint are compared with their digests while they are loaded, so that they are read
once. Damage that is found then lets go of all that was made, and the run begins from the checkpoint before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatrain.checkpoint.format import fingerprint
from megatrain.checkpoint.load import DamagedError
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config import Config
from megatrain.config.sizes import counted
from megatrain.train.records.directory import RunDirectory
from megatrain.train.resume.changes import changed_settings
from megatrain.train.resume.point import as_values
from megatrain.train.resume.state import is_loaded
from megatrain.train.resume_point import find_checkpoint, is_finished, point_of
from megatrain.train.shards import with_shards

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Beginning:
    """Finds the point from which a run begins, and the next one where that one proves damaged."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        resume: str,
        held: Sequence[Sequence[int]],
        num_ranks: int,
    ) -> None:
        """Look at nothing yet.

        Args:
            config: The settings of the run.
            directory: Its directory.
            resume: The wish, as in `find_checkpoint`.
            held: The steps on the drives of every node, as in `find_commit`.
            num_ranks: The number of ranks that train together.
        """
        self._config, self._directory, self._resume, self._held = config, directory, resume, held
        self._num_ranks = num_ranks
        self._damaged: dict[Path, str] = {}
        self._said: set[str] = set()
        self.reader: CheckpointReader | None = None
        """Compares the files of the point's checkpoint that were not compared when it was found, if any."""

    def find(self) -> dict[str, Any] | None:
        """Return what the first rank tells all of how they begin, as plain values; None: the run is finished.

        Raises:
            CheckpointError: `find_checkpoint` and `point_of` raise it.
            ConfigError: `with_shards` raises it.
        """
        config, directory = self._config, self._directory
        directory.remove_leftovers()
        found = find_checkpoint(
            directory, self._resume, is_later=self._is_read_later, damaged=self._damaged, warn=self._warn
        )
        self.reader = None
        if found is not None:
            path, manifest = found
            later = [entry.name for entry in manifest.files if self._is_read_later(entry.name)]
            self.reader = CheckpointReader(path, manifest, later)
            if is_finished(directory, config, manifest):
                self.reader.finish()
                self._tell_finished(manifest.step, manifest.meta["config"])
                return None
        point = point_of(config, directory, found, self._held if self._resume == "auto" else [])
        own = directory.checkpoints.resolve()
        return {
            "point": as_values(point),
            "fingerprint": None if found is None else fingerprint(found[1]),
            "is_own": point.checkpoint is not None and point.checkpoint.resolve().parent == own,
            "shards": with_shards(config, self._num_ranks, point.record).parallel.shards,
        }

    def tried(self, attempt: Callable[[], T]) -> T:
        """Return what an attempt to begin returns, which calls `find`; the one before a damaged checkpoint's.

        Raises:
            DamagedError: The checkpoint that the user has named is damaged.
            CheckpointError: None of the run's checkpoints is whole.
        """
        while True:
            try:
                return attempt()
            except DamagedError as error:
                is_loaded = self.reader is not None and error.path == self.reader.path
                is_alone = self._num_ranks == 1  # others do not know of the error
                if self._resume != "auto" or not (is_alone and is_loaded) or error.path in self._damaged:
                    raise
                self._damaged[error.path] = error.reason  # `plan_memory` lets go of what was made

    def _is_read_later(self, name: str) -> bool:
        """Return whether a file of a checkpoint is compared as it is loaded.

        Not where several ranks load it, who would all have to begin anew, nor where the drives have steps of
        the run: to load a checkpoint overwrites them, and one of them may be newer than the one before.
        """
        return self._num_ranks == 1 and self.is_read_later_by_others(name)

    def is_read_later_by_others(self, name: str) -> bool:
        """Return whether nodes after the first, which has compared the whole, compare a file as they load it.

        A node reads a part of the state, and it is that part which has to be what the first node has seen.
        """
        has_steps = any(step >= 0 for steps in self._held for step in steps)
        return not has_steps and is_loaded(name)

    def _warn(self, sentence: str) -> None:
        if sentence not in self._said:  # each attempt finds the same ones again
            self._said.add(sentence)
            _log.warning("%s", sentence)

    def _tell_finished(self, step: int, saved: Any) -> None:
        _log.info("%s is finished (%s); nothing to do", self._directory.path, counted(step, "step"))
        changed = changed_settings(saved, self._config)
        if changed:
            _log.warning(
                "its settings differ (%s); give a new directory with --out to train with these",
                "; ".join(changed),
            )
