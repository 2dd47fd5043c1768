"""Gives a model rows for new tokens in its embedding and its head; they begin as the mean of the others.

So all new tokens begin alike, and differ once they have been trained. A random row would have a logit far
from those of all other words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from megatrain.model.weights.encoding import Region
from megatrain.model.weights.skeleton import parameters_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def grow(model: PreTrainedModel, num_rows: int | None) -> None:
    """Let the embedding and the head of a model without weights have so many rows, if they have fewer."""
    if num_rows is None or num_rows <= model.get_input_embeddings().num_embeddings:
        return
    with torch.random.fork_rng(devices=[]), no_init_weights(), parameters_on_meta():
        model.resize_token_embeddings(num_rows, mean_resizing=False)


def rows_of(value: Tensor, num_rows: int) -> Iterator[tuple[Tensor, Region]]:
    """Yield a saved parameter, and the rows that it lacks: each is the mean of those that it has, in fp32."""
    yield value, (slice(0, len(value)),)
    mean = value.mean(0, dtype=torch.float32)
    yield mean.expand(num_rows - len(value), *mean.shape), (slice(len(value), num_rows),)
