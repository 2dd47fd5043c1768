"""The reference: log-probabilities of the answers by the untouched model, kept from before the first step.

A model that has been trained cannot give these any more. So they are kept under a name made of the model's
files, the rows and everything that decides their bits. A resumed run finds them there, or asks the untouched
model again, which is read from its own files; the trained one is never asked.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatrain.config import Config
from megatrain.config.sizes import counted
from megatrain.data.cache import Rows, RowWriter, find_rows, kept_rows
from megatrain.data.pairs import SIDES, JudgedRows, NoReference, judged_batch
from megatrain.distributed.alone import ALONE, Alone
from megatrain.errors import CheckpointError, ConfigError
from megatrain.model.weights.files import model_directory
from megatrain.model.weights.fingerprint import fingerprint
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import ids_of, row_losses
from megatrain.stream.lanes.devices import compute_device

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_FORMAT = 1
_PROGRESS_S = 10.0


class Reference:
    """The log-probabilities of all answers of a run, before its first step."""

    def __init__(self, config: Config, rows: Sequence[JudgedRows], folder: Path) -> None:
        """Make a reference; nothing is computed yet.

        Args:
            config: The settings of the run.
            rows: The rows that it trains and evaluates on.
            folder: The folder in which the log-probabilities are kept.

        Raises:
            ModelError: The model's files cannot be read.
        """
        import transformers

        self._rows, self._folder = rows, folder
        self.model = fingerprint(model_directory(config.model.path))
        """The fingerprint of the model."""
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
        if config.model.rope_scaling is not None:
            self._named["rope_scaling"] = config.model.rope_scaling

    def check(self, meta: Mapping[str, Any]) -> None:
        """Refuse to resume with another reference.

        Args:
            meta: The record of the checkpoint or commit from which a run resumes.

        Raises:
            CheckpointError: The answers of the run were compared with another model.
        """
        if meta.get("reference") not in (None, self.model):
            raise CheckpointError(
                "the run's answers were compared with what another model says than the one that is now in "
                "model.path; set model.path to that one, or begin a new run"
            )

    @property
    def is_kept(self) -> bool:
        """Return whether all of it is cached and sound."""
        return all(find_rows(self._folder, self._key(rows)) is not None for rows in self._rows)

    def fill(
        self, untouched: Callable[[], AbstractContextManager[Engine]], ranks: Ranks | Alone = ALONE
    ) -> None:
        """Put the log-probabilities beside the rows: cached ones, or new ones.

        Args:
            untouched: The function that lends an engine of the untouched model without dropout, if something
                is missing.
            ranks: The ranks that train together, of which the first computes.

        Raises:
            OutputError: The log-probabilities cannot be written.
            ConfigError: A rank does not find what the first one has written.
        """
        if ranks.rank > 0:
            ranks.tell()
            self._fill(self._refuse)
            return
        self._fill(untouched)
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
    """Return the reference that rows are compared with; None if there is none, or its values do not matter.

    Args:
        config: The settings of the run.
        rows: The rows that it trains and evaluates on; either all or none are of judged answers.
        folder: The folder in which log-probabilities are kept; None: answers are compared with nothing.

    Raises:
        ModelError: `Reference` raises it.
    """
    judged = [some for some in rows if isinstance(some, JudgedRows)]
    if judged and folder is not None and config.objective.has_reference:
        return Reference(config, judged, folder)
    for some in judged:
        some.reference = NoReference(len(some))
    return None
