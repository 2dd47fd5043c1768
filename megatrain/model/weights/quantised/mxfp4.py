"""Experts in MXFP4 as gpt-oss has them: blocks of 32 values of 4 bits, each with a power of two as its scale.

The files have rows of outputs, and the model rows of inputs, so a weight is transposed too.

Source: OCP Microscaling Formats (MX) Specification v1.0, 5.3.3 (E2M1), 5.4.1 (E8M0) and 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.layout.encoding import Part, Scratch
from megatrain.model.weights.convert import Making, Source
from megatrain.model.weights.encoding import Region, WeightEncoding
from megatrain.model.weights.quantised.arithmetic import (
    LARGEST_FP4,
    fp4,
    fp4_codes,
    fp4_pairs,
    power_for,
    power_table,
    powers,
)
from megatrain.model.weights.quantised.quantisation import Parts, Quantisation, part, require_shape

_BLOCKS, _SCALES = "_blocks", "_scales"

GROUP = 32
"""Values of a block, which have one scale."""
_BYTES = GROUP // 2


@dataclass(frozen=True, slots=True)
class Mxfp4Encoding(WeightEncoding):
    """The codes of a stack of matrices, which stand transposed, in blocks of 32 values with a scale each."""

    shape: tuple[int, int, int]
    """(experts, 32 groups, rows)."""

    @property
    def parts(self) -> dict[str, Part]:
        """Return the codes and the scales, as the files have them."""
        experts, width, rows = self.shape
        grid = experts, rows, width // GROUP
        return {"codes": Part((*grid, _BYTES), torch.uint8), "scales": Part(grid, torch.uint8)}

    def of_all(self, shape: tuple[int, ...], regions: Sequence[Region]) -> Mxfp4Encoding | None:
        """Return this one for a weight of a model that is the file's; see `WeightEncoding`."""
        return self if list(regions) == [()] and shape == self.shape else None

    def put(self, name: str, place: Tensor, region: Region, tensor: Tensor) -> None:
        """Write the tensor, which is the whole part."""
        place.copy_(tensor)

    def prepare(self, device: torch.device) -> None:
        """Make the tables of the values of codes and of scales."""
        fp4_pairs(device)
        power_table(device)

    def decode(self, parts: Mapping[str, Tensor], out: Tensor, scratch: Scratch) -> None:
        """Write the values; see `Encoding`."""
        rows = max(1, scratch.numel // self.shape[1])
        for expert, codes, scales in zip(out, parts["codes"], parts["scales"], strict=True):
            pieces = (each.split(rows) for each in (expert.T, codes, scales))
            for values, of_codes, of_scales in zip(*pieces, strict=True):
                scratch.begin()
                pairs = _looked_up(fp4_pairs(out.device), of_codes, scratch)
                powers = _looked_up(power_table(out.device), of_scales, scratch)
                values.copy_(pairs.view(torch.bfloat16).mul_(powers[..., None]).flatten(1))


def _looked_up(table: Tensor, codes: Tensor, scratch: Scratch) -> Tensor:
    index = scratch.take((codes.numel(),), torch.int32).copy_(codes.flatten())
    found = scratch.take((codes.numel(),), table.dtype)
    torch.index_select(table, 0, index, out=found)
    return found.view(codes.shape)


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
        shape = (experts, GROUP * groups, rows)
        encoding = Mxfp4Encoding(shape)
        making = Making({"codes": blocks, "scales": scales}, encoding.decoded, _encoded, encoding)
        return Source(key=name, file=blocks.file, shape=shape, dtype="BF16", making=making)


def _encoded(old: Parts, value: Tensor) -> dict[str, Tensor]:
    codes, scales = old["codes"].clone(), old["scales"].clone()
    for expert, of_codes, of_scales in zip(value, codes, scales, strict=True):
        values = expert.T.float().view(*of_scales.shape, GROUP)
        before = (fp4(of_codes) * powers(of_scales)[..., None]).float()
        is_new = (values != before).any(-1)
        largest = values.abs().amax(-1)
        fits = largest <= LARGEST_FP4 * powers(of_scales).float()
        of_scales.copy_(torch.where(is_new & ~fits, power_for(largest, LARGEST_FP4), of_scales))
        new = fp4_codes(values / powers(of_scales).float()[..., None])
        of_codes.copy_(torch.where(is_new[..., None], new, of_codes))
    return {"codes": codes, "scales": scales}
