"""How large a micro-batch is, and one large batch as several, cut at the model's entry and nowhere inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.errors import ConfigError

_PER_ROW = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "labels",
    "shift_labels",
    "position_ids",
    "token_type_ids",
)
"""Arguments of a CausalLM whose first dimension is the batch."""


class MicroBatchSize(NamedTuple):
    """A micro-batch's size. Tensors are 0-dim: nobody waits for the device to know them."""

    row_tokens: int
    """Of whole rows."""
    positions: int
    """Tokens, padding too."""
    present: int | Tensor
    """Tokens that are no padding."""

    @classmethod
    def of(cls, named: Mapping[str, Any], parts: int = 1) -> MicroBatchSize | None:
        """Read the arguments of a forward; None if they hold no tokens.

        Args:
            named: The forward's arguments by name.
            parts: The number of parts in which rows are shared out; the arguments hold one part of each row.
        """
        ids, embeds = named.get("input_ids"), named.get("inputs_embeds")
        shape = ids.shape if ids is not None else None if embeds is None else embeds.shape[:-1]
        if not shape:
            return None
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == shape:
            return cls(shape[-1] * parts, shape.numel(), mask.sum())
        return cls(shape[-1] * parts, shape.numel(), shape.numel())


def split_batch(named: Mapping[str, Any] | None, rows: int) -> list[dict[str, Any]] | None:
    """Cut a CausalLM's arguments into micro-batches of `rows` rows; None if there is nothing to cut.

    Raises:
        ConfigError: A tensor that may or may not belong to rows: it is not known how to cut it.
    """
    if named is None or named.get("labels") is None:
        return None
    size = len(named["labels"])
    if size <= rows:
        return None
    for name, value in named.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == size and name not in _PER_ROW:
            raise ConfigError(
                f"a batch of {size} rows is to be split into micro-batches of {rows} (micro_batch_size), but "
                f"it is not known how {name} is split; pass micro-batches of {rows} rows"
            )
    return [
        {
            name: value[start : start + rows]
            if name in _PER_ROW and isinstance(value, Tensor) and len(value) == size
            else value
            for name, value in named.items()
        }
        for start in range(0, size, rows)
    ]


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Put the outputs of the micro-batches together: the sum of losses, and the logits of all rows."""
    first = outputs[0]
    loss = outputs[0].loss
    for output in outputs[1:]:
        loss = loss + output.loss
    parts = [part for output in outputs if isinstance(part := getattr(output, "logits", None), Tensor)]
    whole = torch.cat(parts) if len(parts) == len(outputs) else None
    names = [field.name for field in dataclasses.fields(first)] if dataclasses.is_dataclass(first) else []
    if "logits" not in names:
        return type(first)(loss=loss)
    return type(first)(loss=loss, logits=whole)
