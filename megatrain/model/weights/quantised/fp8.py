"""Weights in FP8 with scales in fp32, bf16 or E8M0: of blocks, of rows, or of the whole tensor.

Sources: the quantization_config of DeepSeek-V3 and of Qwen's and GLM's FP8 models (`weight_scale_inv`, which
multiplies), of FBGEMM and of ModelOpt (`weight_scale`); OCP 8-bit Floating Point Specification v1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.weights.convert import Making, Source
from megatrain.model.weights.quantised.arithmetic import by_rows, fp4, power_for, powers, scaled, stacked
from megatrain.model.weights.quantised.quantisation import Parts, Quantisation, require_shape, value_of

CODES = ("F8_E4M3", "F8_E5M2")
"""The dtypes of codes."""

_SCALES = ("_scale_inv", "_scale")
"""The endings of the name of a weight's scales; both multiply."""

_MX_BLOCK = 32


class Fp8(Quantisation):
    """FP8; a checkpoint may have matrices in MXFP4 among its experts, as two codes per byte."""

    left_out = (
        *(".input_scale", ".activation_scale", ".output_scale", ".input_scale_ub"),
        *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    )

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Take the `quantization_config` of a checkpoint.

        Raises:
            ModelError: Its blocks are none.
        """
        self._block = value_of(values, "weight_block_size", _is_block, where)

    def weight_of(self, key: str, sources: Mapping[str, Source]) -> Source | None:
        """Return the weight of FP8 codes, or of FP4 ones beside scales; see `Quantisation`."""
        codes = sources[key]
        is_fp4 = codes.dtype in ("I8", "U8")
        if key.endswith(_SCALES) or (codes.dtype not in CODES and not is_fp4):
            return None
        found = [key + ending for ending in _SCALES if key + ending in sources]
        if not found:
            if is_fp4:
                return None
            raise ModelError(
                f"{codes.file}: {key} is in {codes.dtype}, and there are no scales of it ({key}_scale_inv or "
                f"{key}_scale)"
            )
        return fp8_weight(codes, sources[found[0]], self._block, is_fp4=is_fp4)


def fp8_weight(codes: Source, scales: Source, block: Any = None, *, is_fp4: bool = False) -> Source:
    """Return a weight of FP8 codes and their scales.

    Args:
        codes: (..., rows, columns).
        scales: One scale, one for each row, or one for each block, of which the last ones may be smaller.
        block: The rows and columns of a block; None: the scales are of rows, or of the whole.
        is_fp4: Whether the codes are of MXFP4, two in a byte.

    Raises:
        ModelError: The scales do not belong to the codes.
    """
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if is_fp4 else 1))
    size = (1, _MX_BLOCK) if is_fp4 else _block_of(codes, scales, block)
    if is_fp4:
        require_shape(scales, (*shape[:-1], shape[-1] // _MX_BLOCK))
    if scales.dtype not in ("F32", "BF16", "F16", "F8_E8M0", "U8"):
        raise ModelError(f"{scales.file}: {scales.key} has dtype {scales.dtype}, which scales never have")
    made = partial(_decoded, shape=shape, block=size, is_fp4=is_fp4)
    encode = None if is_fp4 else partial(_encoded, block=size)
    return Source(
        key=codes.key,
        file=codes.file,
        shape=shape,
        dtype="BF16",
        making=Making({"codes": codes, "scales": scales}, made, encode),
    )


def _is_block(found: Any) -> bool:
    is_pair = isinstance(found, (list, tuple)) and len(found) == 2
    return found is None or (is_pair and all(isinstance(each, int) and each > 0 for each in found))


def _block_of(codes: Source, scales: Source, block: Any) -> tuple[int, int]:
    """Return the rows and columns of one scale's block.

    Raises:
        ModelError: The scales are of no blocks of these codes.
    """
    shape = codes.shape if len(codes.shape) > 1 else (*codes.shape, 1)
    rows, columns = shape[-2:]
    stack, grid = shape[:-2], scales.shape
    whole = (max(rows, 1), max(columns, 1))
    if grid in ((), (1,), (1, 1), (*stack, 1, 1), stack):
        return whole
    if grid in ((rows,), (rows, 1), (*stack, rows, 1)):
        return 1, whole[1]
    if block is not None and grid == (*stack, -(-rows // block[0]), -(-columns // block[1])):
        return block[0], block[1]
    size = ", and no size of blocks is named" if block is None else f" in blocks of {block[0]} x {block[1]}"
    raise ModelError(
        f"{scales.file}: {scales.key} has shape {list(grid)}, which does not belong to {codes.key} of shape "
        f"{list(codes.shape)}{size}"
    )


def _decoded(parts: Parts, shape: tuple[int, ...], block: tuple[int, int], *, is_fp4: bool) -> Tensor:
    height, width = block
    matrix = shape if len(shape) > 1 else (*shape, 1)
    codes = stacked(parts["codes"].reshape(*matrix[:-1], -1))
    scales = _as_floats(parts["scales"]).reshape(-1, -(-matrix[-2] // height), -(-matrix[-1] // width))
    scales = scales.expand(len(codes), -1, -1)

    def rows(number: int, piece: slice) -> Tensor:
        values = fp4(codes[number, piece]) if is_fp4 else codes[number, piece]
        of_rows = scales[number].index_select(0, torch.arange(piece.start, piece.stop) // height)
        return scaled(values.float(), of_rows, width)

    return by_rows(matrix, rows).view(shape)


def _encoded(old: Parts, value: Tensor, block: tuple[int, int]) -> dict[str, Tensor]:
    """Return the codes and scales of a value; see `megatrain.model.weights.requantise`."""
    height, width = block
    codes, grid = old["codes"].clone(), old["scales"].clone()
    matrix = codes.shape if codes.ndim > 1 else (*codes.shape, 1)
    size = -(-matrix[-2] // height), -(-matrix[-1] // width)
    most = torch.finfo(codes.dtype).max
    before = _decoded(old, tuple(codes.shape), block, is_fp4=False)
    stack = [each.reshape(-1, *matrix[-2:]) for each in (codes, before, value)]
    scales = grid.view(-1, *size)
    for number in range(len(scales)):
        of_all = slice(None) if len(scales) == 1 else slice(number, number + 1)
        of_codes, old_values, values = (each[of_all] for each in stack)
        is_new, largest = _blocks_of(old_values.float(), values.float(), block, size)
        fits = largest <= most * _as_floats(scales[number])
        new = _scales_for(largest, most, scales[number])
        scales[number] = torch.where(is_new & ~fits, new, scales[number].view(new.dtype)).view(grid.dtype)
        rows, columns = torch.arange(matrix[-2]) // height, torch.arange(matrix[-1]) // width
        factor = _as_floats(scales[number])[rows][:, columns]
        encoded = (values.float() / factor).clamp(-most, most).to(codes.dtype)
        changed = is_new[rows][:, columns].expand(of_codes.shape)
        as_bytes = of_codes.view(torch.uint8)
        as_bytes.copy_(torch.where(changed, encoded.view(torch.uint8), as_bytes))
    return {"codes": codes, "scales": grid}


def _blocks_of(
    before: Tensor, values: Tensor, block: tuple[int, int], size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return of each block whether a value has changed, and the largest one, for a stack of matrices."""
    more = (0, size[1] * block[1] - values.shape[-1], 0, size[0] * block[0] - values.shape[-2])

    def largest(sizes: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(sizes, more)
        return padded.view(len(sizes), size[0], block[0], size[1], block[1]).amax((0, 2, 4))

    return largest((values != before).float()) > 0, largest(values.abs())


def _scales_for(largest: Tensor, most: float, like: Tensor) -> Tensor:
    """Return the smallest scales with which the largest values are at most `most`; E8M0 ones as bytes."""
    if like.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return power_for(largest, most)
    exact = largest.double() / most
    scales = exact.to(like.dtype)
    bits = scales.view(torch.int32 if like.dtype == torch.float32 else torch.int16)
    bits += scales.double() < exact  # the next larger number has the next larger bits
    return scales


def _as_floats(scales: Tensor) -> Tensor:
    is_power = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return (powers(scales) if is_power else scales).float()
