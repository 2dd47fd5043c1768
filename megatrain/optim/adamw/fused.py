"""Launches AdamW as one Triton kernel for blocks whose state is on an accelerator.

It gives the bits of `device.update_on_device`, and reads and writes each byte of the planes once, in place of
some twenty times. Where it runs is said by the vendor's row (`hardware.accelerators`), by whether Triton is
installed, and by a trial.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.hardware.accelerators import launching_on, triton_options, why_no_kernel
from megatrain.optim.adamw.device import update_on_device
from megatrain.optim.adamw.host import AdamWStep, Planes

ROWS = 4
"""Rows of `SCALE_NUMEL` elements that a program takes: with four warps, eight elements per thread."""


@torch.no_grad()
def update_fused(ranges: Iterable[tuple[AdamWStep, Planes]], rows: int = ROWS) -> None:
    """Update ranges in place, bit for bit as `adamw.update_many` does.

    One launch for each, into the current stream of their device; without scratch memory.

    Args:
        ranges: The hyper-parameters and planes of each range; ranges must not overlap.
        rows: The number of rows of a program, a power of two; the result does not depend on it.
    """
    from megatrain.optim.adamw import fused_kernels

    for hyper, planes in ranges:
        planes.check()
        numel = planes.working.numel()
        if not numel:
            continue
        options = triton_options(planes.working.device.type) or {}
        scale, decay, weight1, beta2, weight2, correction2, _, eps, step_size = map(float, hyper.scalars())
        first, second, base = hyper.noise
        with launching_on(planes.working.device):
            fused_kernels.update[(-(-numel // (rows * SCALE_NUMEL)),)](
                _bits(planes.working),
                _bits(planes.remainder),
                _bits(planes.exp_avg),
                _bits(planes.exp_avg_sq),
                planes.exp_avg_scale,
                planes.exp_avg_sq_scale,
                _bits(planes.gradient),
                numel,
                scale,
                decay,
                weight1,
                beta2,
                weight2,
                correction2,
                eps,
                step_size,
                _signed(first),
                _signed(second),
                base,
                IS_FROM_MEAN=weight1 > 0,
                ROWS=rows,
                **options,
            )


def update_resident(device: torch.device, ranges: Iterable[tuple[AdamWStep, Planes]]) -> None:
    """Update ranges whose planes are on a device: by the kernel where it runs, else by torch's operations."""
    if fuses_updates(device):
        update_fused(ranges)
    else:
        update_on_device(ranges)


def fuses_updates(device: torch.device) -> bool:
    """Return whether the kernel updates blocks on a device; else torch's operations do.

    The first call for a kind of device tries the kernel there. One that fails, or gives other bits than
    torch's operations, is not used, and a warning says so once.
    """
    return device.type != "cpu" and why_not_fused(device.type) is None


@cache
def why_not_fused(kind: str) -> str | None:
    """Return why torch's operations update blocks on a kind of device; None: the kernel does."""
    return why_no_kernel(
        kind,
        lambda device: "" if _try(device) else "gives other bits than torch's operations",
        "blocks on the device are updated by torch's operations",
    )


def _try(device: torch.device) -> bool:
    """Compare the bits of the kernel and of torch's operations, on a few numbers in each format."""
    numel = SCALE_NUMEL + 64
    spread = torch.logspace(-42, 10, numel)  # from denormals on
    codes, scales = torch.arange(numel).to(torch.uint8), torch.tensor([1e-3, 1e-6])
    hyper = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, noise=(1, 2, 0))
    results: list[list[Tensor]] = []
    for update in (update_fused, update_on_device):
        results.append([])
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            has_codes = dtype == torch.uint8
            planes = {
                "working": spread.flip(0).bfloat16(),
                "remainder": torch.arange(numel, dtype=torch.int16),
                "exp_avg": codes if has_codes else spread.roll(7).to(dtype),
                "exp_avg_sq": codes.flip(0) if has_codes else spread.roll(11).square().to(dtype),
                "gradient": -spread.roll(100),
                **({"exp_avg_scale": scales, "exp_avg_sq_scale": scales.flip(0)} if has_codes else {}),
            }
            planes = {name: plane.to(device, copy=True) for name, plane in planes.items()}
            update([(hyper, Planes(**planes))])
            results[-1] += [plane.cpu().view(torch.uint8) for plane in planes.values()]
    return all(torch.equal(actual, expected) for actual, expected in zip(*results, strict=True))


def _bits(plane: Tensor | None) -> Tensor | None:
    """Return the plane as the kernel reads it: bf16 as int16."""
    return plane.view(torch.int16) if plane is not None and plane.dtype == torch.bfloat16 else plane


def _signed(word: int) -> int:
    """Return the signed integer of 32 bits that has the bits of a word: of one type whatever its value."""
    return word - (1 << 32) if word >= 1 << 31 else word
