"""Losses of batches and of their rows, while the state streams."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatrain.model.head.positions import PositionSums
from megatrain.model.shares import IGNORED, RowSums, Share, count_targets

if TYPE_CHECKING:
    from megatrain.stream.engine import Engine


def ids_of(batch: Mapping[str, Any]) -> int:
    """Return how many tokens a batch of the model's forward has, padding included."""
    return int(batch["input_ids"].numel())


class BatchLoss(NamedTuple):
    """The loss of a batch."""

    loss: Tensor
    """The mean over `num_targets` tokens."""
    num_targets: int
    by_position: PositionSums | None
    """The same by ranges of positions; None: nobody has asked."""


def losses(engine: Engine, batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Tensor, int]]:
    """Yield the mean loss of each batch, and over how many tokens it is the mean; see `batch_losses`."""
    yield from ((found.loss, found.num_targets) for found in batch_losses(engine, batches))


def batch_losses(
    engine: Engine, batches: Iterable[Mapping[str, Any]], *, by_position: bool = False
) -> Iterator[BatchLoss]:
    """Yield the mean loss of each batch.

    Batches pass together, as many as `Together.fit` allows, and each has the bits of a pass alone.
    The head runs in chunks where those of training do: the logits of a batch are never there as a whole. Call
    it between two steps. A batch without a token to train on is passed over.

    Args:
        engine: The engine, whose model is in the mode that is wanted (`eval`).
        batches: The batches, each as keyword arguments of the model's forward, `labels` included.
        by_position: Whether the loss is wanted by ranges of positions too; then all batches pass the head in
            chunks, which end where ranges do.
    """
    engine.require_attached()
    model, options = engine.model, _options(engine)

    def loss_of(batch: Mapping[str, Any], count: int, sums: PositionSums | None) -> Tensor:
        with engine._model_forward.head.over(Share(count, count, by_position=sums)):
            loss: Tensor = model(**{**batch, **options}).loss
        return loss

    for group in engine.together.groups(batches, ids_of):
        counted = [
            (batch, count, PositionSums(batch) if by_position else None)
            for batch in group
            if (count := count_targets(batch))
        ]
        found = engine.together.run([partial(loss_of, *each) for each in counted])
        for loss, (_, count, sums) in zip(found, counted, strict=True):
            yield BatchLoss(loss, count, sums)


def row_losses(engine: Engine, batch: Mapping[str, Any]) -> Tensor:
    """Return the loss of each row, summed over its labelled tokens: minus the log-probability of its answer.

    It has gradients where they are wanted, as in a call of `Engine.run_losses`, and else is for one of
    `Together.run`. The head runs row by row, each in chunks of tokens.

    Args:
        engine: The engine, whose model is in the mode that is wanted.
        batch: The keyword arguments of the model's forward, `labels` included.

    Returns:
        A 1-dim tensor of fp32.
    """
    engine.require_attached()
    with engine._model_forward.head.over(RowSums()):
        output = engine.model(**{**batch, **_options(engine)})
    if output.loss.ndim == 1:
        return output.loss.float()
    logits = output.logits[:, :-1].float()  # of a model whose loss has no parts
    targets = batch["labels"][:, 1:].to(logits.device)
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED
    )
    return losses.sum(-1)


def _options(engine: Engine) -> dict[str, Any]:
    """Return what is asked of the model beside a batch: no cache, which would be filled and never read."""
    caches = "use_cache" in inspect.signature(type(engine.model).forward).parameters
    return {"return_dict": True, **({"use_cache": False} if caches else {})}
