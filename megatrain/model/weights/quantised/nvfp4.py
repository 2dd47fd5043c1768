"""Weights in NVFP4: blocks of 16 values of 4 bits, with a scale in FP8 each, and one in fp32 for all.

Sources: ModelOpt (`weight_scale_2`, which multiplies) and compressed-tensors (`weight_global_scale`, by which
the scales of blocks are divided); NVIDIA, "Introducing NVFP4".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from megatrain.model.weights.convert import Making, Source
from megatrain.model.weights.quantised.arithmetic import by_rows, fp4, scaled, stacked
from megatrain.model.weights.quantised.quantisation import Parts, part, require_shape

BLOCK = 16


def nvfp4_weight(
    name: str, codes: Source, sources: Mapping[str, Source], *, scales: str, whole: str, divides: bool
) -> Source:
    """Return a weight of NVFP4 codes.

    Args:
        name: The key of the weight.
        codes: (..., rows, columns / 2) bytes of two codes each, that of the low bits first.
        sources: The tensors of the files.
        scales: The key of the blocks' scales, (..., rows, columns / 16) in E4M3.
        whole: The key of the scale of all.
        divides: Whether that one divides, and does not multiply.

    Raises:
        ModelError: The parts do not belong together.
    """
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    of_blocks, of_all = part(sources, scales, codes), part(sources, whole, codes)
    require_shape(of_blocks, (*shape[:-1], shape[-1] // BLOCK))
    require_shape(of_all, (), (1,), shape[:-2], (*shape[:-2], 1))
    parts = {"codes": codes, "scales": of_blocks, "whole": of_all}
    make = partial(_decoded, shape=shape, divides=divides)
    return Source(key=name, file=codes.file, shape=shape, dtype="BF16", making=Making(parts, make))


def _decoded(parts: Parts, shape: tuple[int, ...], *, divides: bool) -> Tensor:
    codes, scales = stacked(parts["codes"]), stacked(parts["scales"])
    whole = parts["whole"].float().reshape(-1).expand(len(codes))

    def rows(number: int, piece: slice) -> Tensor:
        of_blocks = scales[number, piece].float()
        of_blocks = of_blocks / whole[number] if divides else of_blocks * whole[number]
        return scaled(fp4(codes[number, piece]).float(), of_blocks, BLOCK)

    return by_rows(shape, rows)
