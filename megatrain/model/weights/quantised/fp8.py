"""Weights in FP8 with scales in fp32, bf16 or E8M0: of blocks, of rows, or of the whole tensor.

Sources: the quantization_config of DeepSeek-V3 and of Qwen's and GLM's FP8 models (`weight_scale_inv`, which
multiplies), of FBGEMM and of ModelOpt (`weight_scale`); OCP 8-bit Floating Point Specification v1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.layout.encoding import Part, Scratch
from megatrain.model.weights.convert import Making, Source
from megatrain.model.weights.encoding import Region, WeightEncoding
from megatrain.model.weights.quantised.arithmetic import (
    by_rows,
    fp4,
    power_for,
    powers,
    scaled,
    stacked,
)
from megatrain.model.weights.quantised.quantisation import Parts, Quantisation, require_shape, value_of

CODES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""The dtypes of codes, as safetensors and as torch spell them."""

_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")

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
    if scales.dtype not in _SCALE_DTYPES:
        raise ModelError(f"{scales.file}: {scales.key} has dtype {scales.dtype}, which scales never have")
    parts = {"codes": codes, "scales": scales}
    if is_fp4:
        making = Making(parts, partial(_decoded_fp4, shape=shape))
    else:
        encoding = Fp8Encoding(shape, size, CODES[codes.dtype])
        making = Making(parts, encoding.decoded, partial(_encoded, encoding=encoding), encoding)
    return Source(key=codes.key, file=codes.file, shape=shape, dtype="BF16", making=making)


@dataclass(frozen=True, slots=True)
class Fp8Encoding(WeightEncoding):
    """Codes of 8 bits in the shape of the weight, with a scale for each block of its matrices."""

    shape: tuple[int, ...]
    block: tuple[int, int]
    """The rows and columns of a block, of which the last ones may be smaller."""
    dtype: torch.dtype
    """The type of the codes."""

    @property
    def parts(self) -> dict[str, Part]:
        """Return the codes, and the scales as a grid, in fp32, which has all values of the other types."""
        *stack, rows, columns = self.shape if len(self.shape) > 1 else (*self.shape, 1)
        grid = *stack, -(-rows // self.block[0]), -(-columns // self.block[1])
        return {"codes": Part(self.shape, self.dtype), "scales": Part(grid, torch.float32)}

    def of_all(self, shape: tuple[int, ...], regions: Sequence[Region]) -> Fp8Encoding | None:
        """Return the encoding of weights that are stacked, or joined at edges of blocks."""
        if len(shape) < 2:
            return None
        for region in regions:
            for place, size, step in zip(_last_two(region, len(shape)), shape[-2:], self.block, strict=True):
                start, stop, _ = place.indices(size)
                if start % step or (stop % step and stop != size):
                    return None
        return replace(self, shape=shape)

    def put(self, name: str, place: Tensor, region: Region, tensor: Tensor) -> None:
        """Write codes of a file's weight where it is, and its scales where those of its blocks are."""
        if name == "codes":
            place[region].view(torch.uint8).copy_(tensor.view(torch.uint8))
            return
        steps = zip(_last_two(region, place.ndim), self.shape[-2:], self.block, strict=True)
        blocks = [slice((at.start or 0) // step, -(-(at.stop or size) // step)) for at, size, step in steps]
        where = (*region[: place.ndim - 2], ..., *blocks)
        place[where] = self._grid_of(tensor)

    def _grid_of(self, scales: Tensor) -> Tensor:
        """Return the scales of a file as the grid of this weight: one for a stack is that of each matrix."""
        grid = self.parts["scales"].shape
        return _as_floats(scales).reshape(-1, *grid[-2:]).expand(prod(grid[:-2]), -1, -1).reshape(grid)

    def of_file(self, parts: Parts) -> Parts:
        """Return the parts of a weight of a file, as they are kept."""
        return {"codes": parts["codes"], "scales": self._grid_of(parts["scales"])}

    def decode(self, parts: Parts, out: Tensor, scratch: Scratch) -> None:
        """Write the values; see `Encoding`."""
        matrix = self.shape if len(self.shape) > 1 else (*self.shape, 1)
        stacks = (stacked(each.view(*matrix)) for each in (parts["codes"], out))
        for codes, values, scales in zip(*stacks, stacked(parts["scales"]), strict=True):
            for piece in _pieces(len(codes), self.block[0], scratch.numel // max(matrix[-1], 1)):
                scratch.begin()
                made = scratch.take((len(piece), matrix[-1]), torch.float32)
                made.copy_(codes[piece.start : piece.stop])
                self._scale(made, scales[piece.start // self.block[0] :])
                target = values[piece.start : piece.stop]
                target.copy_(made)
                if out.dtype != torch.bfloat16:
                    scratch.begin()
                    target.copy_(scratch.take((len(piece), matrix[-1]), torch.bfloat16).copy_(target))

    def _scale(self, values: Tensor, scales: Tensor) -> None:
        """Multiply some rows in place by their scales, which begin with those of the first row."""
        height, width = self.block
        whole = len(values) // height
        scaled(values[: whole * height].unflatten(0, (whole, height)), scales[:whole, None], width)
        if len(values) % height:
            scaled(values[whole * height :], scales[whole, None], width)


def _pieces(rows: int, height: int, most: int) -> Iterator[range]:
    """Yield ranges of about so many rows at most: of whole blocks, or inside of one."""
    step = max(1, most) if most < height else most // height * height
    for start in range(0, rows, height if step < height else step):
        stop = min(start + max(step, height), rows)
        for first in range(start, stop, step):
            yield range(first, min(first + step, stop))


def _last_two(region: Region, num_dims: int) -> tuple[slice, slice]:
    """Return the rows and columns of a region in a stack of matrices."""
    rows, columns = (*region, *[slice(None)] * (num_dims - len(region)))[-2:]
    assert isinstance(rows, slice)
    assert isinstance(columns, slice)
    return rows, columns


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


def _decoded_fp4(parts: Parts, shape: tuple[int, ...]) -> Tensor:
    codes, scales = stacked(parts["codes"]), stacked(_as_floats(parts["scales"]))

    def rows(number: int, piece: slice) -> Tensor:
        return scaled(fp4(codes[number, piece]).float(), scales[number, piece], _MX_BLOCK)

    return by_rows(shape, rows)


def _encoded(old: Parts, value: Tensor, encoding: Fp8Encoding) -> dict[str, Tensor]:
    """Return the codes and scales of a value; see `megatrain.model.weights.requantise`."""
    height, width = block = encoding.block
    codes, grid = old["codes"].clone(), old["scales"].clone()
    matrix = codes.shape if codes.ndim > 1 else (*codes.shape, 1)
    size = -(-matrix[-2] // height), -(-matrix[-1] // width)
    most = torch.finfo(codes.dtype).max
    before = encoding.decoded(old)
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
