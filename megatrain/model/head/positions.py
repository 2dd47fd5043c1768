"""The loss of a batch by ranges of positions: how well a token is foretold with so many tokens before it.

The head's chunks end where a range ends, so each chunk's loss belongs to one range. What is kept of a batch
is one number for each range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.model.shares import IGNORED

FIRST_TOKENS = 1024
"""The tokens of the first range; each later one ends at twice the position of the one before."""


def range_name(number: int) -> str:
    """Return the name of a range, such as `0-1k` or `2k-4k`, in 1,024 tokens."""
    return "0-1k" if number == 0 else f"{_in_k(number - 1)}-{_in_k(number)}"


def _in_k(doublings: int) -> str:
    return f"{2**doublings}k" if doublings < 10 else f"{2 ** (doublings - 10)}M"


class PositionSums:
    """The sums of one batch's losses by ranges of positions, made while its head runs in chunks."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        """Say where ranges begin and end.

        A token's position is the number of tokens of its document before it; without `position_ids`, of its
        row. Tokens that are not trained on belong to the range before them, so they cut nothing.

        Args:
            batch: The arguments of the model's forward: `labels`, (B, T) on the CPU, each the target of the
                token before it, and perhaps `position_ids` of the same shape.
        """
        labels = batch["labels"].numpy()
        given = batch.get("position_ids")
        before = np.arange(labels.shape[1])[None] if given is None else given.numpy()
        is_target = np.zeros(labels.shape, dtype=bool)
        is_target[:, :-1] = labels[:, 1:] != IGNORED
        doublings = np.frexp((before + 1) / FIRST_TOKENS)[1]  # the exact exponent of a power of two
        flat = np.broadcast_to(np.maximum(doublings, 0), labels.shape).reshape(-1)
        counted = is_target.reshape(-1)
        self.counts = np.bincount(flat[counted], minlength=1).tolist()
        """The number of targets in each range."""
        last = np.maximum.accumulate(np.where(counted, np.arange(flat.size), -1))
        ranges = np.where(last < 0, flat[counted.argmax()], flat[last])
        cuts = np.flatnonzero(np.diff(ranges)) + 1
        self.ends: list[int] = [*cuts.tolist(), ranges.size]
        """Where ranges end, in the tokens of all rows one after the other."""
        self._numbers: list[int] = ranges[[0, *cuts]].tolist()
        self._count = int(counted.sum())
        self._parts: Tensor | None = None

    def take(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Add up the losses of chunks, each with the number of its first token; none crosses an end.

        Each loss is a sum over the tokens of the chunk, divided by the number of all targets.
        """
        held: list[list[Tensor]] = [[] for _ in self.counts]
        place = 0
        for start, loss in parts:
            while self.ends[place] <= start:
                place += 1
            held[self._numbers[place]].append(loss)
        zero = torch.zeros((), dtype=torch.float64, device=parts[0][1].device)
        sums = [torch.stack(each).double().sum() if each else zero for each in held]
        self._parts = torch.stack(sums) * self._count

    def as_values(self) -> list[tuple[float, int]] | None:
        """Return the sum of the losses of each range and its number of targets; None: it is not known.

        It waits for the device.
        """
        return None if self._parts is None else list(zip(self._parts.tolist(), self.counts, strict=True))


def means_by_position(
    batches: Sequence[Sequence[tuple[float, int]] | None],
) -> dict[str, tuple[float, int]]:
    """Return the mean loss of each range that has tokens, and how many, by its name.

    Args:
        batches: The results of `PositionSums.as_values`, in the order in which they are added up.

    Returns:
        Nothing if that of a batch is not known: its loss was not made in chunks.
    """
    known = [each for each in batches if each is not None]
    if len(known) < len(batches):
        return {}
    found: dict[str, tuple[float, int]] = {}
    for number in range(max(map(len, known), default=0)):
        here = [each[number] for each in known if number < len(each)]
        count = sum(count for _, count in here)
        if count:
            found[range_name(number)] = sum(loss for loss, _ in here) / count, count
    return found
