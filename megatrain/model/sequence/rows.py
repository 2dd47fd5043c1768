"""One shard's part of a micro-batch: what the model is called with in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatrain.errors import ConfigError
from megatrain.model.sequence.shards import Shards
from megatrain.model.shares import IGNORED

_FILL = {"input_ids": 0, "shift_labels": IGNORED, "attention_mask": 0}
"""The arguments that are cut, with the value that fills rows up to a multiple of the shards: nothing that is
trained on sees what comes behind it."""


def cut_rows(batch: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """Return a shard's part of every row of a micro-batch.

    Labels are shifted before they are cut, since the first token of the next shard is the target of the last
    one of this. Positions are those within the whole row.

    Args:
        batch: Arguments of a causal language model's forward, of whole rows, with `labels`.
        shards: The shards, which say who has the tokens.

    Raises:
        ConfigError: An argument of the batch cannot be cut, or the start of the row's tokens is not known.
    """
    rows = dict(batch)
    ids = rows.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ConfigError(
            "parallel.sequence cuts rows of input_ids; the micro-batch has none of (rows, tokens)"
        )
    labels = rows.pop("labels", None)
    if rows.get("shift_labels") is None:
        rows["shift_labels"] = pad(labels, (0, 1), value=IGNORED)[..., 1:]
    given = rows.pop("position_ids", None)
    if given is None:
        mask = rows.get("attention_mask")
        if isinstance(mask, Tensor) and not bool(mask[:, 0].all()):
            raise ConfigError(
                "parallel.sequence takes rows that are padded at their end; give position_ids with others"
            )
        given = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if given.shape != ids.shape:
        raise ConfigError(
            f"position_ids have the shape {tuple(given.shape)}, and input_ids {tuple(ids.shape)}; with "
            "parallel.sequence both are the same"
        )
    missing = -ids.shape[1] % shards.number
    more = given[:, -1:] + torch.arange(1, missing + 1, device=given.device)
    whole = {"position_ids": torch.cat([given, more], dim=1)}
    for name, value in rows.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if name not in _FILL or value.shape != ids.shape:
            raise ConfigError(
                f"a micro-batch has {name} of the shape {tuple(value.shape)}, of which it is not known how "
                "rows of it are cut; leave it out, or use parallel.sequence=1"
            )
        whole[name] = pad(value, (0, missing), value=_FILL[name])
    part = {
        name: value.chunk(shards.number, dim=1)[shards.index].contiguous() for name, value in whole.items()
    }
    # a loss that shifts by itself in spite of `shift_labels` is found by the check of the model
    return rows | part | {"labels": part["shift_labels"]}
