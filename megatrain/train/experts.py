"""The load of experts: how evenly a step's tokens went to them, and which experts get none for long.

Counts are of all ranks. Which experts get none is counted anew after a resume.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatrain.distributed.alone import Alone
from megatrain.distributed.ranks import Ranks
from megatrain.errors import MegatrainError, warn_once
from megatrain.files import write_bytes_durably
from megatrain.stream.forward.expert_loads import ExpertLoads

_log = logging.getLogger(__name__)

WINDOW = 100
"""The steps in a row without a token after which an expert is named."""

_NUM_SHOWN = 8


class ExpertWatch:
    """Reads a step's counts, and warns once of each expert that gets no token."""

    def __init__(self, loads: ExpertLoads, ranks: Ranks | Alone) -> None:
        """Watch what an engine counts.

        Args:
            loads: The counts of this rank.
            ranks: The ranks that train together, whose counts are added up.
        """
        self._loads = loads
        self._ranks = ranks
        self._steps_without: dict[str, Tensor] = {}
        """By router, for each expert the steps since it last got a token."""
        self._named: dict[str, Tensor] = {}
        """Whether each of them was named."""
        self._total: dict[str, Tensor] = {}
        self._num_steps = 0

    def take(self) -> dict[str, dict[str, float]] | None:
        """Return the load of a step, by router; None: the model has no experts. Every rank calls it.

        Call it where the loss has been read: nothing else is waited for.
        """
        if not self._loads.has_routers:
            return None
        counts = self._summed({router: count.tolist() for router, count in self._loads.take().items()})
        dead = {router: found for router, count in counts.items() if (found := self._dead(router, count))}
        if dead and self._ranks.rank == 0:
            _log.warning(
                "experts that got no token in %d steps: %s; each is named once", WINDOW, _listed(dead)
            )
        self._num_steps += 1
        self._total |= {router: self._total.get(router, 0) + count for router, count in counts.items()}
        return {router: load_of(count) for router, count in counts.items()}

    def drop(self) -> None:
        """Forget what was counted of a step that runs again."""
        if self._loads.has_routers:
            self._loads.take()

    def write(self, path: Path) -> None:
        """Write the tokens of every expert of every router, over the steps of this process, if there are any.

        A file that cannot be written is a warning: the next save writes all of it.
        """
        if self._num_steps:
            tokens = {router: count.tolist() for router, count in self._total.items()}
            body = {"steps": self._num_steps, "tokens": tokens}
            try:
                write_bytes_durably(path, (json.dumps(body) + "\n").encode())
            except MegatrainError as error:
                warn_once(_log, f"{error}. The run goes on, and tries again at its next save")

    def _summed(self, mine: Mapping[str, list[int]]) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for counts in self._ranks.gather_values(mine):
            for router, count in counts.items():
                total[router] = total.get(router, 0) + torch.tensor(count)
        return total

    def _dead(self, router: str, count: Tensor) -> list[int]:
        """Return the experts that have been without a token for so long, and were not named."""
        before = self._steps_without.get(router, torch.zeros_like(count))
        after = self._steps_without[router] = torch.where(count > 0, 0, before + 1)
        named = self._named.setdefault(router, torch.zeros_like(count, dtype=torch.bool))
        dead = (after >= WINDOW) & ~named
        named |= dead
        found: list[int] = dead.nonzero().flatten().tolist()
        return found


def load_of(count: Tensor) -> dict[str, float]:
    """Return how evenly tokens went to a router's experts, as in `StepMetrics.experts`.

    Args:
        count: (experts,) int64, the tokens of each expert.
    """
    total = max(1, int(count.sum()))
    return {
        "busiest": round(int(count.max()) / total, 6),
        "least": round(int(count.min()) / total, 6),
        "unused": int((count == 0).sum()),
    }


def _listed(dead: Mapping[str, list[int]]) -> str:
    """Return some experts in words: `3.mlp.gate 0, 7; 5.mlp.gate 2`."""
    parts = [f"{router} {_shown(list(map(str, found)), ', ')}" for router, found in dead.items()]
    return _shown(parts, "; ")


def _shown(texts: list[str], between: str) -> str:
    more = f" and {len(texts) - _NUM_SHOWN} more" if len(texts) > _NUM_SHOWN else ""
    return between.join(texts[:_NUM_SHOWN]) + more
