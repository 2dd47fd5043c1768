"""The kernels of AdamW, on the host and on a device, bit for bit the same: what `optim.updates` asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.optim.adamw.fused import update_resident, why_not_fused
from megatrain.optim.adamw.host import AdamWStep, Planes, update_many
from megatrain.optim.pool import WorkerPool
from megatrain.optim.tasks import Apart
from megatrain.optim.updates import Ranges

__all__ = ["update_on_device", "update_on_host", "why_not_fused"]


def update_on_host(pool: WorkerPool, ranges: Ranges, apart: Sequence[Sequence[Apart]] = ()) -> None:
    """Update ranges in host memory."""
    update_many(pool, _as_adamw(ranges), apart)


def update_on_device(device: torch.device, ranges: Ranges) -> None:
    """Update ranges on a device: by one kernel where it runs, else by torch's operations."""
    update_resident(device, _as_adamw(ranges))


def _as_adamw(ranges: Ranges) -> list[tuple[AdamWStep, Planes]]:
    found = []
    for step, planes in ranges:
        beta1, beta2 = step.hyper["betas"]
        hyper = AdamWStep(
            lr=step.hyper["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=step.hyper["eps"],
            weight_decay=step.hyper["weight_decay"],
            step=step.count,
            grad_scale=step.grad_scale,
            noise=step.noise,
        )
        working, remainder, gradient = planes.working, planes.remainder, planes.gradient
        found.append((hyper, Planes(working=working, remainder=remainder, gradient=gradient, **planes.state)))
    return found
