"""The scratch memory in which codes become values on a device; no torch is needed to count it."""

from __future__ import annotations

DECODED_NUMEL = 1 << 22
"""Values that are made of codes in one go, at most: so many that launches of kernels take little time."""

_SCRATCH_BYTES, _SCRATCH_ENDS = 5, 1024
"""Scratch memory of each: an fp32 value, or a pair's index and two bf16 values; and what aligns its parts."""


def decoding_scratch(numel: int) -> int:
    """Return the bytes of scratch memory in which weights of so many values, or fewer, are decoded."""
    return _SCRATCH_BYTES * min(numel, DECODED_NUMEL) + _SCRATCH_ENDS if numel else 0


def decoded_numel(nbytes: int) -> int:
    """Return of how many values so many bytes of scratch memory are for."""
    return max(1, (nbytes - _SCRATCH_ENDS) // _SCRATCH_BYTES)
