"""Checkpoints of bitsandbytes: NF4 and FP4 by a table of 16 values, and INT8 with a scale for each row.

Source: bitsandbytes, `QuantState.from_dict` and `dequantize_4bit`; Dettmers et al., arXiv 2305.14314.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.weights.convert import Making, Source
from megatrain.model.weights.quantised.arithmetic import by_rows
from megatrain.model.weights.quantised.quantisation import Parts, Quantisation, part, require_shape

_STATE = ".quant_state.bitsandbytes__"


class BitsAndBytes(Quantisation):
    """What a weight is, its own tensors say: 4 bits have a state beside them, 8 bits an `SCB`."""

    left_out = (".weight_format",)

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Take the `quantization_config` of a checkpoint, which says nothing that its tensors do not."""

    def weight_of(self, key: str, sources: Mapping[str, Source]) -> Source | None:
        """Return the weight whose codes a tensor is; see `Quantisation`."""
        codes = sources[key]
        if codes.dtype == "I8" and key.endswith(".weight"):
            scales = part(sources, key.removesuffix("weight") + "SCB", codes)
            require_shape(scales, codes.shape[:1])
            order = sources.get(key + "_format")
            if order is not None and self.read(order).flatten().tolist() != [0]:
                raise ModelError(
                    f"{codes.file}: {key} is in an order of columns that is not read ({order.key})"
                )
            making = Making({"codes": codes, "scales": scales}, _decoded_int8)
            return Source(key=key, file=codes.file, shape=codes.shape, dtype="BF16", making=making)
        state = next(
            (sources[key + _STATE + kind] for kind in ("nf4", "fp4") if key + _STATE + kind in sources), None
        )
        return None if state is None else self._weight_of_4_bits(codes, state, sources)

    def _weight_of_4_bits(self, codes: Source, state: Source, sources: Mapping[str, Source]) -> Source:
        values = self._state(state)
        shape, block = tuple(values["shape"]), values["blocksize"]
        num_blocks = -(-prod(shape) // block)
        parts = {"codes": codes, "state": state}
        for name in ("absmax", "quant_map"):
            parts[name] = part(sources, f"{codes.key}.{name}", codes)
        require_shape(codes, (-(-prod(shape) // 2), 1), (-(-prod(shape) // 2),))
        require_shape(parts["absmax"], (num_blocks,))
        require_shape(parts["quant_map"], (16,))
        nested, offset = values.get("nested_blocksize"), values.get("nested_offset", 0.0)
        if nested is not None:
            for name in ("nested_absmax", "nested_quant_map"):
                parts[name] = part(sources, f"{codes.key}.{name}", codes)
            require_shape(parts["nested_absmax"], (-(-num_blocks // nested),))
            require_shape(parts["nested_quant_map"], (256,))
        make = partial(_decoded_4_bits, shape=shape, block=block, nested=nested, offset=offset)
        return Source(key=codes.key, file=codes.file, shape=shape, dtype="BF16", making=Making(parts, make))

    def _state(self, source: Source) -> dict[str, Any]:
        """Read what a weight of 4 bits says of itself, JSON in bytes.

        Raises:
            ModelError: It is none.
        """
        text = bytes(self.read(source).flatten().tolist())
        try:
            values = json.loads(text)
            sizes = [*values["shape"], values["blocksize"]]
            fits = all(isinstance(size, int) and size > 0 for size in sizes)
        except (ValueError, KeyError, TypeError, RecursionError):
            fits = False
        if not fits:
            raise ModelError(f"{source.file}: {source.key} does not say the shape and the blocks of a weight")
        return values


def _decoded_int8(parts: Parts) -> Tensor:
    codes, scales = parts["codes"], parts["scales"].float()
    return by_rows(tuple(codes.shape), lambda _, piece: codes[piece].float() * (scales[piece, None] / 127))


def _decoded_4_bits(
    parts: Parts, shape: tuple[int, ...], block: int, nested: int | None, offset: float
) -> Tensor:
    absmax = parts["absmax"]
    if nested is not None:
        scales = parts["nested_absmax"].float().repeat_interleave(nested)[: len(absmax)]
        absmax = parts["nested_quant_map"].float()[absmax.int()] * scales + offset
    table = parts["quant_map"].float()
    codes, absmax, width = parts["codes"].flatten(), absmax.float(), shape[-1]

    def rows(number: int, piece: slice) -> Tensor:
        first = (number * shape[-2] + piece.start) * width if len(shape) > 1 else 0
        places = torch.arange(first, first + (piece.stop - piece.start) * width)
        packed = codes[places // 2].int()
        found = torch.where(places % 2 == 0, packed >> 4, packed & 15)
        return (table[found] * absmax[places // block]).view(-1, width)

    return by_rows(shape if len(shape) > 1 else (1, *shape), rows).view(shape)
