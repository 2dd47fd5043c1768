"""Split an fp32 master weight into a bf16 working weight and its 16-bit remainder, and join them again.

Every one of the 2^32 bit patterns survives the round trip (proved by `benchmarks/store/prove_split.py`):
denormals, -0, infinities and every NaN included. The working weight is the master rounded to nearest, ties
away from zero; it differs from `master.bfloat16()`, which rounds ties to even, on exact ties only. Rounding
to even cannot be undone by 16 bits: its remainders take 65537 values.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 18
"""Elements per pass: scratch memory stays at 1 MiB and in cache, whatever the size of the weights."""


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 weights into a bf16 working weight and its 16-bit remainder.

    Args:
        master: float32, contiguous, any shape.

    Returns:
        bfloat16, rounded to nearest; int16; both in the shape of `master`. `join_master` restores every bit.

    Source: Split-SGD (Kalamkar et al., 2020), with rounding in place of truncation.
    """
    working = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    split_master_into(master, working, remainder)
    return working, remainder


def join_master(working: Tensor, remainder: Tensor) -> Tensor:
    """Restore the fp32 weights that `split_master` was given, bit for bit.

    Args:
        working: bfloat16, contiguous, any shape.
        remainder: int16, contiguous, as many elements.

    Returns:
        float32 in the shape of `working`.
    """
    out = torch.empty_like(working, dtype=torch.float32)
    join_master_into(working, remainder, out)
    return out


def split_master_into(master: Tensor, working: Tensor, remainder: Tensor) -> None:
    """Split fp32 weights into two given tensors, with 1 MiB of scratch memory.

    Args:
        master: float32, contiguous, N elements.
        working: bfloat16, contiguous, N elements; overwritten.
        remainder: int16, contiguous, N elements; overwritten.
    """
    bits, high, low = _flat_bits(master, working, remainder)
    scratch = torch.empty(min(CHUNK_NUMEL, bits.numel()), dtype=torch.int32)
    for start in range(0, bits.numel(), CHUNK_NUMEL):
        chunk = slice(start, start + CHUNK_NUMEL)
        rounded = scratch[: bits[chunk].numel()]
        # Half a bf16 ulp: truncation would pull every weight toward zero.
        torch.add(bits[chunk], 0x8000, out=rounded).bitwise_right_shift_(16)
        high[chunk].copy_(rounded)
        low[chunk].copy_(bits[chunk])


def join_master_into(working: Tensor, remainder: Tensor, out: Tensor) -> None:
    """Restore fp32 weights into a given tensor, with no scratch memory.

    Args:
        working: bfloat16, contiguous, N elements.
        remainder: int16, contiguous, N elements.
        out: float32, contiguous, N elements; overwritten.
    """
    bits, high, low = _flat_bits(out, working, remainder)
    for start in range(0, bits.numel(), CHUNK_NUMEL):
        chunk = slice(start, start + CHUNK_NUMEL)
        bits[chunk].copy_(high[chunk]).bitwise_left_shift_(16).add_(low[chunk])


def _flat_bits(master: Tensor, working: Tensor, remainder: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three tensors as flat integers, after checking that they belong together."""
    assert master.dtype == torch.float32, f"master is {master.dtype}"
    assert working.dtype == torch.bfloat16, f"working is {working.dtype}"
    assert remainder.dtype == torch.int16, f"remainder is {remainder.dtype}"
    assert master.numel() == working.numel() == remainder.numel(), "planes of different sizes"
    assert all(plane.is_contiguous() for plane in (master, working, remainder)), "planes must be contiguous"
    flat = (plane.detach().view(-1) for plane in (master, working, remainder))
    high_dtypes = (torch.int32, torch.int16, torch.int16)
    bits, high, low = (plane.view(dtype) for plane, dtype in zip(flat, high_dtypes, strict=True))
    return bits, high, low
