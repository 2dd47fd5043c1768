"""What the untouched model says of the answers: computed before the first step, and kept.

Once a model is trained, nobody can ask it what it said before. So the log-probabilities are kept under a name
of the model's files, the rows and all that decides their bits; a run that goes on finds them there, or asks
the untouched model again, which is read from its own files, and never the trained one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.config import Config
from megatrain.config.sizes import counted
from megatrain.data.cache import Rows, RowWriter, is_kept, kept_rows
from megatrain.data.pairs import SIDES, JudgedRows, NoReference, judged_batch
from megatrain.distributed.ranks import Ranks
from megatrain.errors import CheckpointError, ConfigError
from megatrain.model.weights.files import model_directory
from megatrain.model.weights.fingerprint import fingerprint
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import ids_of, row_losses
from megatrain.stream.lanes.devices import compute_device

_log = logging.getLogger(__name__)

_FORMAT = 1
_PROGRESS_S = 10.0


class Reference:
    """The log-probabilities of all answers of a run, before its first step."""

    def __init__(self, config: Config, rows: Sequence[JudgedRows], folder: Path) -> None:
        """Compute nothing yet.

        Args:
            config: Of the run.
            rows: Those that it trains and evaluates on.
            folder: Where they are kept.

        Raises:
            ModelError: The model's files cannot be read.
        """
        import transformers

        self._rows, self._folder = rows, folder
        self.model = fingerprint(model_directory(config.model.path))
        """Its fingerprint."""
        self._size = config.train.micro_batch_size
        self._named = {
            "format": _FORMAT,
            "model": self.model,
            "software": [torch.__version__, transformers.__version__],
            "device": compute_device(config.train.device).type,
            "precision": config.train.precision,
            "attention": config.model.attn_implementation,
            "kernels": config.model.kernels,
            "compile": config.train.compile,
            "head_chunk_tokens": config.memory.head_chunk_tokens,
            "rows_at_once": self._size,
        }

    def check(self, meta: Mapping[str, Any]) -> None:
        """Refuse to go on with another reference.

        Args:
            meta: Of the checkpoint or commit that a run goes on from.

        Raises:
            CheckpointError: Its answers were compared with what another model says.
        """
        if meta.get("reference") not in (None, self.model):
            raise CheckpointError(
                "the run's answers were compared with what another model says than the one that is now in "
                "model.path; set model.path to that one, or begin a new run"
            )

    @property
    def is_kept(self) -> bool:
        """Whether all of it is there, sound."""
        return all(is_kept(self._folder, self._key(rows)) for rows in self._rows)

    def fill(
        self, untouched: Callable[[], AbstractContextManager[Engine]], ranks: Ranks | None = None
    ) -> None:
        """Put the log-probabilities beside the rows: those that are kept, or new ones.

        Args:
            untouched: Lends an engine of the model as it was before the first step, in the mode without
                dropout; called if something is missing.
            ranks: That train together: the first one computes, and the others read. None: there is one.

        Raises:
            OutputError: They cannot be written.
            ConfigError: A rank does not find what the first one has written.
        """
        if ranks is not None and ranks.rank > 0:
            ranks.tell()
            self._fill(self._refuse)
            return
        self._fill(untouched)
        if ranks is not None:
            ranks.tell()

    def _fill(self, untouched: Callable[[], AbstractContextManager[Engine]]) -> None:
        with ExitStack() as stack:
            engine: list[Engine] = []

            def make(rows: JudgedRows, place: Path) -> dict[str, Any]:
                if not engine:
                    engine.append(stack.enter_context(untouched()))
                return self._make(place, engine[0], rows)

            for rows in self._rows:
                rows.reference = kept_rows(self._folder, self._key(rows), partial(make, rows)).rows

    def _refuse(self) -> AbstractContextManager[Engine]:
        raise ConfigError(
            f"the first rank has kept the reference in {self._folder}, and this one finds nothing there; set "
            "data.cache to a folder that all ranks see"
        )

    def _key(self, rows: JudgedRows) -> str:
        text = json.dumps({**self._named, "rows": rows.name}, sort_keys=True)
        return f"reference-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    def _make(self, place: Path, engine: Engine, rows: JudgedRows) -> dict[str, Any]:
        began_s = shown_s = time.monotonic()
        _log.info(
            "computing the reference: what the model says of %s before it is trained",
            counted(len(rows), "row"),
        )
        batches = (
            judged_batch(rows.rows[range(first, min(first + self._size, len(rows)))])
            for first in range(0, len(rows), self._size)
        )
        with RowWriter(place, SIDES) as writer:
            for group in engine.together.groups(batches, ids_of):
                for found in engine.together.run([partial(row_losses, engine, batch) for batch in group]):
                    writer.write((-found).view(-1, SIDES).cpu().numpy().astype("<f4").view(np.int32))
                now_s = time.monotonic()
                if now_s - shown_s > _PROGRESS_S:
                    shown_s = now_s
                    rate = writer.num_rows / (now_s - began_s)
                    _log.info(
                        "reference: %s of %s rows, %.3g/s", f"{writer.num_rows:,}", f"{len(rows):,}", rate
                    )
            name = writer.close()
        return {"shape": [writer.num_rows, SIDES], "fingerprint": name}


def reference_for(config: Config, rows: Iterable[Rows], folder: Path | None) -> Reference | None:
    """Return what rows are compared with; None: nothing, or nothing that matters.

    Args:
        config: The settings of the run.
        rows: The rows that it trains and evaluates on; of judged answers all are, or none.
        folder: The folder in which log-probabilities are kept; None: answers are compared with nothing.

    Raises:
        ModelError: As `Reference`.
    """
    judged = [some for some in rows if isinstance(some, JudgedRows)]
    if judged and folder is not None and config.objective.has_reference:
        return Reference(config, judged, folder)
    for some in judged:
        some.reference = NoReference(len(some))
    return None
