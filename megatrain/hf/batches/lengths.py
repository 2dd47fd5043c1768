"""The check that no row of a trainer's batches is longer than the range of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatrain.model.sequence.range import OF_TRAINER, check_row, row_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def refuse_long(batches: Sequence[Any], model: PreTrainedModel) -> None:
    """Refuse batches with rows that are longer than the model takes.

    Padding counts only where nothing says what is padding.

    Raises:
        ConfigError: A row is beyond the range.
    """
    rows = row_range(model.config)
    for batch in batches:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.ndim < 2 or rows.longest is None:
            continue
        if ids.shape[-1] > rows.longest:  # masks are read for these alone, since that waits for the device
            check_row(_longest(ids, batch), rows, named="a row of {seq_len} tokens", extends=OF_TRAINER)


def _longest(ids: Tensor, batch: Mapping[str, Any]) -> int:
    """Return the tokens of the longest row, without padding."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape == ids.shape:  # packed rows begin anew
        return int(positions.max()) + 1
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return int(mask.sum(-1).max())
    return ids.shape[-1]
