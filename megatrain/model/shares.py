"""The share that a micro-batch has of a step's loss: of the loss of tokens, and of what models add to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


IGNORED = -100
"""The label of a token that is not trained on, as in torch and transformers."""


class ByPosition(Protocol):
    """What takes the loss of a batch by ranges of positions."""

    @property
    def ends(self) -> Sequence[int]:
        """Where ranges end, in the tokens of all rows one after the other."""

    def take(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Take the losses of chunks, each with the number of its first token; none crosses an end."""


def count_targets(batch: Mapping[str, Any]) -> int:
    """Count the tokens of a micro-batch that the loss averages over: labels after the causal shift.

    Raises:
        DataError: The batch has no labels.
    """
    count = targets_of(batch)
    if count is None:
        raise DataError(
            "a micro-batch has no 'labels'; pass labels of the shape of input_ids, -100 where not trained"
        )
    return int(count)


def targets_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the same as a 0-dim tensor, for which nobody has to wait; None: the batch has no labels."""
    if batch.get("shift_labels") is not None:
        return (batch["shift_labels"] != IGNORED).sum()
    if batch.get("labels") is None:
        return None
    return (batch["labels"][..., 1:] != IGNORED).sum()


@dataclass(slots=True)
class Share:
    """A micro-batch's part of the tokens over which a step's loss is averaged."""

    total: int
    count: int
    num_averaged: int = 1
    """Micro-batches over which what the model adds to the loss of tokens is averaged; 1: as it is."""
    was_used: bool = False
    """The model's own code divided by `total`."""
    of_tokens: Tensor | None = None
    """The loss of tokens, where the model returns what it adds to it alone."""
    by_position: ByPosition | None = None
    """What takes the loss of tokens by their positions; None: nobody asks for it."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the micro-batch's part of the step's loss, scaled here if the model's own code did not."""
        if self.was_used:
            return self.joined(loss)
        return loss if self.count == self.total else loss * (self.count / self.total)

    def parted(self, of_tokens: Tensor) -> Tensor:
        """Return what the model is to take for the loss of tokens: zero, where what it adds is averaged."""
        if self.num_averaged == 1:
            return of_tokens
        self.of_tokens = of_tokens
        return torch.zeros_like(of_tokens)

    def joined(self, loss: Tensor) -> Tensor:
        """Return the sum of the loss of tokens and the average, of a loss that was parted."""
        if self.of_tokens is None:
            return loss
        of_tokens, self.of_tokens = self.of_tokens, None
        return of_tokens + loss / self.num_averaged


class RowSums:
    """A sign, in place of a share, that the coming loss is a vector: each row's sum over its tokens."""


def adds_router_loss(config: PretrainedConfig) -> bool:
    """Whether a model adds the balance of its routers to the loss of tokens, unless a call says otherwise."""
    return bool(getattr(config.get_text_config(), "output_router_logits", False))
