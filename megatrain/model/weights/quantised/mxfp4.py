"""Experts in MXFP4 as gpt-oss has them: blocks of 32 values of 4 bits, each with a power of two as its scale.

The files have rows of outputs, and the model rows of inputs, so a weight is transposed too.

Source: OCP Microscaling Formats (MX) Specification v1.0, 5.3.3 (E2M1), 5.4.1 (E8M0) and 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.model.weights.convert import Making, Source
from megatrain.model.weights.quantised.arithmetic import (
    LARGEST_FP4,
    fp4,
    fp4_codes,
    power_for,
    powers,
    rows_of_piece,
)
from megatrain.model.weights.quantised.quantisation import Parts, Quantisation, part, require_shape

_BLOCKS, _SCALES = "_blocks", "_scales"

_BYTES = 16
"""Of a block of 32 values."""


class Mxfp4(Quantisation):
    """The experts of gpt-oss."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Take the `quantization_config` of a checkpoint, which says nothing of its weights."""

    def weight_of(self, key: str, sources: Mapping[str, Source]) -> Source | None:
        """Return the stack of matrices whose blocks a tensor is; see `Quantisation`."""
        blocks = sources[key]
        if not key.endswith(_BLOCKS) or blocks.dtype != "U8":
            return None
        name = key.removesuffix(_BLOCKS)
        scales = part(sources, name + _SCALES, blocks)
        require_shape(blocks, (*blocks.shape[:3], _BYTES))
        require_shape(scales, blocks.shape[:3])
        experts, rows, groups = scales.shape
        shape = (experts, 2 * _BYTES * groups, rows)
        making = Making({"codes": blocks, "scales": scales}, partial(_decoded, shape=shape), _encoded)
        return Source(key=name, file=blocks.file, shape=shape, dtype="BF16", making=making)


def _encoded(old: Parts, value: Tensor) -> dict[str, Tensor]:
    codes, scales = old["codes"].clone(), old["scales"].clone()
    for expert, of_codes, of_scales in zip(value, codes, scales, strict=True):
        values = expert.T.float().view(*of_scales.shape, 2 * _BYTES)
        before = (fp4(of_codes) * powers(of_scales)[..., None]).float()
        is_new = (values != before).any(-1)
        largest = values.abs().amax(-1)
        fits = largest <= LARGEST_FP4 * powers(of_scales).float()
        of_scales.copy_(torch.where(is_new & ~fits, power_for(largest, LARGEST_FP4), of_scales))
        new = fp4_codes(values / powers(of_scales).float()[..., None])
        of_codes.copy_(torch.where(is_new[..., None], new, of_codes))
    return {"codes": codes, "scales": scales}


def _decoded(parts: Parts, shape: tuple[int, ...]) -> Tensor:
    made = torch.empty(shape, dtype=torch.bfloat16)
    length = rows_of_piece(shape[1])
    for expert, codes, scales in zip(made, parts["codes"], parts["scales"], strict=True):
        pieces = (each.split(length) for each in (expert.T, codes, scales))
        for values, of_codes, of_scales in zip(*pieces, strict=True):
            values.copy_((fp4(of_codes).mul_(powers(of_scales)[..., None])).flatten(1))
    return made
