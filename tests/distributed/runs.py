"""A whole run on several ranks, one of which may be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from megatrain.train.loop import train
from tests.train.project import make_config


def train_run(ranks: Any, *, root: str, out: str, killed: list[int] | None = None, **sections: Any) -> str:
    """Train, or go on training.

    Args:
        ranks: That train together.
        root: Directory of the model and the text.
        out: Run directory in it.
        killed: A rank, and the number of its exchange of gradients in which it is killed.
        sections: Of the configuration.
    """
    if killed is not None and ranks.rank == killed[0]:
        _kill_in_exchange(ranks, killed[1])
    sections["train"] = {"grad_accumulation": 4, "steps": 6} | sections.get("train", {})
    sections = {"data": {"val_size": 0.02}, "eval": {"every": 3}, **sections}
    config = make_config(Path(root), out, parallel={"shards": 4}, checkpoint={"every": 2}, **sections)
    return str(train(config, ranks=ranks))


def _kill_in_exchange(ranks: Any, number: int) -> None:
    exchange, left = ranks.exchange, number

    def counted(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*arguments)

    ranks.exchange = counted
