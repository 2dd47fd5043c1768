"""The size of a micro-batch, as its forward is given it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class MicroBatchSize(NamedTuple):
    """A micro-batch's size. Tensors are 0-dim: nobody waits for the device to know them."""

    row_tokens: int
    positions: int
    """Tokens, padding too."""
    present: int | Tensor
    """Tokens that are no padding."""

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> MicroBatchSize | None:
        """Read the arguments of a forward; None if they hold no tokens."""
        ids, embeds = named.get("input_ids"), named.get("inputs_embeds")
        shape = ids.shape if ids is not None else None if embeds is None else embeds.shape[:-1]
        if not shape:
            return None
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == shape:
            return cls(shape[-1], shape.numel(), mask.sum())
        return cls(shape[-1], shape.numel(), shape.numel())
