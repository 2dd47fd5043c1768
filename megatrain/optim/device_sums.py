"""Sums of gradients on a device: bf16 is added to fp32 without torch's slow way for mixed dtypes.

`torch._foreach_add_` has no fast path where dtypes differ: each tensor goes through a kernel that casts every
element by itself, and reads and writes one at a time (aten/native/cuda/Loops.cuh). The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megatrain.hardware.accelerators import launching_on, triton_options, why_no_kernel

_BLOCK = 1 << 11
"""Elements that a program adds: 16 for each thread of four warps."""

KERNEL_NUMEL = 1 << 16
"""Elements from which a tensor is worth a launch of its own; smaller ones are added together by torch."""


@torch.no_grad()
def add_all(sums: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add gradients to their sums, in place and in the precision of the sums.

    Args:
        sums: fp32, or of the dtype of the values.
        values: Of the same shapes and on the same device, each.
    """
    others = [*zip(sums, values, strict=True)]
    if others and adds_by_kernel(sums[0].device):
        pairs, others = others, []
        with launching_on(sums[0].device):
            for total, value in pairs:
                if _suits(total, value):
                    _add_by_kernel(total, value)
                else:
                    others.append((total, value))
    if others:
        torch._foreach_add_([total for total, _ in others], [value for _, value in others])


def adds_by_kernel(device: torch.device) -> bool:
    """Return whether the kernel adds on a device; the first call for a kind of device tries it there."""
    return device.type != "cpu" and why_not_by_kernel(device.type) is None


@cache
def why_not_by_kernel(kind: str) -> str | None:
    """Return why torch's operations add up gradients on a kind of device; None: the kernel does."""
    return why_no_kernel(
        kind,
        lambda device: "" if try_kernel(device) else "gives other bits than torch's operations",
        "gradients on the device are added up by torch's operations",
    )


def try_kernel(device: torch.device) -> bool:
    """Return whether the kernel gives the bits of torch's addition, on numbers of all sizes.

    They are as many as a multiple of 16 or not, which Triton compiles differently.
    """
    is_same = True
    for more in (100, 112):
        spread = torch.logspace(-44, 38, 2 * _BLOCK + more)
        values, sums = spread.bfloat16().to(device), -spread.roll(7).to(device)
        expected = sums + values
        _add_by_kernel(sums, values)
        is_same &= torch.equal(sums.view(torch.int32).cpu(), expected.view(torch.int32).cpu())
    return is_same


def _suits(total: Tensor, value: Tensor) -> bool:
    return (
        total.dtype == torch.float32
        and value.dtype == torch.bfloat16
        and value.numel() >= KERNEL_NUMEL
        and total.is_contiguous()
        and value.is_contiguous()
    )


def _add_by_kernel(total: Tensor, value: Tensor) -> None:
    from megatrain.optim import device_sums_kernel

    numel = value.numel()
    options = triton_options(total.device.type) or {}
    values = value.view(torch.int16)
    device_sums_kernel.add[(-(-numel // _BLOCK),)](total, values, numel, BLOCK=_BLOCK, **options)
