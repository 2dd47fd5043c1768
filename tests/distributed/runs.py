"""A whole run on several ranks, one of which may be killed."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

from megatrain.train.loop import train
from tests.train.project import make_config


def train_run(
    ranks: Any,
    *,
    root: str,
    out: str,
    killed: list[int] | None = None,
    how: str = "SIGKILL",
    **sections: Any,
) -> str:
    """Train, or go on training.

    Args:
        ranks: That train together.
        root: Directory of the model and the text.
        out: Run directory in it.
        killed: A rank, and the number of its collective, of whatever kind, before which it is killed.
        how: By which signal; `hang`: it is not killed, and waits for ever.
        sections: Of the configuration.
    """
    if killed is not None and ranks.rank == killed[0]:
        _kill_at(ranks, killed[1], how)
    sections["train"] = {"grad_accumulation": 4, "steps": 6} | sections.get("train", {})
    sections = {"data": {"val_size": 0.02}, "eval": {"every": 3}, **sections}
    config = make_config(Path(root), out, parallel={"shards": 4}, checkpoint={"every": 2}, **sections)
    return str(train(config, ranks=ranks))


def _kill_at(ranks: Any, number: int, how: str) -> None:
    """Let a rank end, or hang, before one of its collectives."""
    collective, numbers = ranks._do, itertools.count(1)

    def counted(*arguments: Any) -> None:
        if next(numbers) == number:
            if how == "hang":
                threading.Event().wait()
            os.kill(os.getpid(), signal.Signals[how])
        collective(*arguments)

    ranks._do = counted
