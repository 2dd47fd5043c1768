"""Losses of batches without gradients, while the state streams."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.model.head import Share, count_targets

if TYPE_CHECKING:
    from megatrain.stream.engine import Engine


def losses(engine: Engine, batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Tensor, int]]:
    """Yield the mean loss of each batch, and over how many tokens it is the mean.

    The head runs in chunks where those of training do: the logits of a batch are never there as a whole. Call
    it between two steps. A batch without a token to train on is passed over.

    Args:
        engine: Its model is in the mode (`eval`) that is wanted.
        batches: Keyword arguments of the model's forward, `labels` included.
    """
    engine.require_attached()
    model = engine.model
    # a cache of keys and values would be filled, and nobody would read it
    caches = "use_cache" in inspect.signature(type(model).forward).parameters
    options = {"use_cache": False} if caches else {}
    for batch in batches:
        count = count_targets(batch)
        if count == 0:
            continue
        with torch.no_grad(), engine._model_forward.over(Share(count, count)):
            loss: Tensor = model(**{**batch, **options, "return_dict": True}).loss
        yield loss, count
