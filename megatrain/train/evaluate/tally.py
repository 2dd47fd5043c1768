"""The tally of the values of the rows of a step or of a set, and their means."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.objective.objective import Shown


class Tally:
    """Adds up the values of a step's or a set's rows; nobody waits for the device until the end."""

    def __init__(self) -> None:
        """Make an empty tally."""
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, shown: Shown) -> None:
        """Add a batch."""
        for name, values in shown.items():
            self._parts.setdefault(name, []).append(values.detach())

    def take_sum(self, name: str) -> float:
        """Return the sum of a value over all rows, and leave that value out from here on."""
        return float(torch.cat(self._parts.pop(name)).double().sum())

    def means(self) -> dict[str, float]:
        """Return each value's mean over the rows that have it, and the margin of the rewards."""
        rows = {name: torch.cat(parts).double() for name, parts in self._parts.items()}
        means = {name: float(values.mean()) for name, values in rows.items() if len(values)}
        if {"rewards/chosen", "rewards/rejected"} <= means.keys():
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means


def as_values(shown: Shown) -> dict[str, list[float]]:
    """Return the values of some rows as plain values, for other ranks."""
    return {name: values.tolist() for name, values in shown.items()}
