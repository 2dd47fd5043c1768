"""Codes and scales become values: in pieces, so that a weight takes its own memory and little more."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod

import torch
from torch import Tensor

_PIECE = 1 << 19
"""Elements that are computed at once."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1, by code: OCP Microscaling Formats (MX) v1.0, 5.3.3."""


def rows_of_piece(width: int) -> int:
    """Return how many rows of so many columns are computed at once."""
    return max(_PIECE // max(width, 1), 1)


def by_rows(shape: tuple[int, ...], rows: Callable[[int, slice], Tensor]) -> Tensor:
    """Return a weight in bf16, of one matrix or a stack of them, computed some rows at a time.

    Args:
        shape: (..., rows, columns).
        rows: The function that returns some rows of a matrix, by its number in the stack.
    """
    height, width = shape[-2:]
    made = torch.empty((prod(shape[:-2]), height, width), dtype=torch.bfloat16)
    length = rows_of_piece(width)
    for number in range(len(made)):
        for start in range(0, height, length):
            piece = slice(start, min(start + length, height))
            made[number, piece] = rows(number, piece)
    return made.view(shape)


def stacked(tensor: Tensor) -> Tensor:
    """View a matrix or a stack of them as (number, rows, columns)."""
    return tensor.reshape(-1, *tensor.shape[-2:])


def of_each_row(values: Tensor, rows: int) -> Tensor:
    """Return scales or zero points of each row, (rows, groups) in fp32, of those of all rows or of each."""
    return values.float().reshape(-1, values.shape[-1] if values.ndim == 2 else 1).expand(rows, -1)


def scaled(values: Tensor, scales: Tensor, times: int) -> Tensor:
    """Multiply values in place by the scales of their groups, of which the last one may have fewer.

    Args:
        values: (..., columns) in fp32.
        scales: (..., groups).
        times: The columns of a group.
    """
    whole = values.shape[-1] // times
    values[..., : whole * times].unflatten(-1, (whole, times)).mul_(scales[..., :whole, None])
    values[..., whole * times :].mul_(scales[..., whole:])
    return values


LARGEST_FP4 = 6.0


def fp4_codes(values: Tensor) -> Tensor:
    """Return the nearest E2M1 codes of fp32 values, of two as near the even one, two in a byte.

    Args:
        values: (..., 2 N), of which larger ones than 6 become 6.

    Returns:
        (..., N) bytes.
    """
    size = values.abs()
    codes = values.signbit().to(torch.uint8) << 3
    for number, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        codes += size >= middle if number % 2 else size > middle
    return codes[..., ::2] | codes[..., 1::2] << 4


def power_for(largest: Tensor, most: float) -> Tensor:
    """Return the codes of the smallest powers of two with which the largest values are at most `most`."""
    exponents = (largest.double() / most).log2().ceil()
    return (exponents.clamp(-127, 127) + 127).to(torch.uint8)


@cache
def fp4_pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte, that of the low four bits first, as two bf16 in one int32."""
    codes = torch.arange(256)
    values = torch.tensor(_FP4, dtype=torch.bfloat16)
    return torch.stack([values[codes & 15], values[codes >> 4]], dim=1).view(torch.int32).flatten().to(device)


@cache
def power_table(device: torch.device) -> Tensor:
    """Return the scale of each E8M0 code, as `powers` does."""
    return powers(torch.arange(256, dtype=torch.uint8)).to(device)


def fp4(packed: Tensor) -> Tensor:
    """Return the values of E2M1 codes, two per byte, in bf16: (..., N) bytes become (..., 2 N)."""
    pairs = fp4_pairs(packed.device).index_select(0, packed.reshape(-1).view(torch.uint8).int())
    return pairs.view(torch.bfloat16).view(*packed.shape[:-1], 2 * packed.shape[-1])


def powers(exponents: Tensor) -> Tensor:
    """Return the scales of E8M0 codes in bf16: 2 ** (code - 127), and NaN for 255."""
    bits = exponents.view(torch.uint8).to(torch.int16) << 7
    bits.masked_fill_(exponents.view(torch.uint8) == 0, 0x0040)  # 2 ** -127 has no leading one
    bits.masked_fill_(exponents.view(torch.uint8) == 255, 0x7FC0)
    return bits.view(torch.bfloat16)


def unpacked(words: Tensor, bits: int, length: int) -> Tensor:
    """Return the unsigned codes that int32 words hold along dimension 1, the lowest bits first.

    Args:
        words: (rows, words).
        bits: The bits of a code, which divide 32.
        length: The number of codes of a row; more than that are padding.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :length]
