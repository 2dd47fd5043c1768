"""The head and the loss: normalised over a whole step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.errors import DataError

IGNORED = -100
"""The label of a token that is not trained on, as in torch and transformers."""


def count_targets(batch: Mapping[str, Any]) -> int:
    """Count the tokens of a micro-batch that the loss averages over: labels after the causal shift.

    Raises:
        DataError: The batch has no labels.
    """
    if batch.get("shift_labels") is not None:
        return int((batch["shift_labels"] != IGNORED).sum())
    if batch.get("labels") is None:
        raise DataError(
            "a micro-batch has no 'labels'; pass labels of the shape of input_ids, -100 where not trained"
        )
    return int((batch["labels"][..., 1:] != IGNORED).sum())


class Normaliser:
    """Makes the model's own loss an average over a step's tokens, whatever the number of micro-batches."""

    def __init__(self, model: PreTrainedModel, chunk_tokens: int | None) -> None:
        """Put a wrapper around the model's loss function."""
        self._model = model
        self._original: Callable[..., Tensor] = model.loss_function
        self._was_set = "_loss_function" in model.__dict__
        self._takes_total = "num_items_in_batch" in inspect.signature(self._original).parameters
        self._total: int | None = None
        self._count = 0
        self._was_used = False
        model.loss_function = self._loss

    def remove(self) -> None:
        """Give the model its loss function back."""
        if self._was_set:
            self._model.loss_function = self._original
        else:
            del self._model._loss_function

    @contextmanager
    def over(self, total: int, count: int) -> Iterator[None]:
        """Average over `total` tokens of the step; the coming micro-batch has `count` of them."""
        self._total, self._count, self._was_used = total, count, False
        try:
            yield
        finally:
            self._total = None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the micro-batch's part of the step's loss, scaled here if the model's own code did not."""
        if self._was_used or self._count == self._total:
            return loss
        assert self._total is not None
        return loss * (self._count / self._total)

    def call(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward."""
        return inner(*args, **kwargs)

    def _loss(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._total is not None and self._takes_total:
            kwargs.setdefault("num_items_in_batch", torch.tensor(self._total))
            self._was_used = True
        return self._original(*args, **kwargs)
