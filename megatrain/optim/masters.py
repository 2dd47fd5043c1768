"""Split fp32 masters on any device, in torch operations: as `store.master` splits and joins them."""

from __future__ import annotations

import torch
from torch import Tensor


def join_on_device(working: Tensor, remainder: Tensor, out: Tensor) -> None:
    """Restore fp32 masters, as `store.master.join_master_into` does.

    Args:
        working: (N,) bfloat16.
        remainder: (N,) int16.
        out: (N,) float32; overwritten.
    """
    out.view(torch.int32).copy_(working.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)


def split_on_device(master: Tensor, working: Tensor, remainder: Tensor, scratch: Tensor) -> None:
    """Split fp32 masters, as `store.master.split_master_into` does.

    Args:
        master: (N,) float32.
        working: (N,) bfloat16; overwritten.
        remainder: (N,) int16; overwritten.
        scratch: (N,) float32; overwritten. May be `master`.
    """
    bits, rounded = master.view(torch.int32), scratch.view(torch.int32)
    remainder.copy_(bits)
    torch.add(bits, 0x8000, out=rounded).bitwise_right_shift_(16)
    working.view(torch.int16).copy_(rounded)
