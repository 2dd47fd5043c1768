"""The kernels of sign-SGD, with momentum or without, on the host and on a device, bit for bit the same.

With the decay w of weights, the rate r and the gradient g, the momentum becomes m = beta m + (1 - beta) g,
and the master p (1 - r w) - r sign(m). Every operation is rounded to fp32 by itself, so results are those of
a plain loop in torch. Without momentum m is g. Of a momentum in bf16 the sign is taken before it is rounded,
to the nearest. Where m is zero, or no number, the master only decays.

Importing this module imports Numba (half a second): `kernels_of` does, where it is used.

Source: signSGD: Compressed Optimisation for Non-Convex Problems (Bernstein et al., 2018).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.layout.pools import UPDATE_CHUNK_NUMEL
from megatrain.optim.kernels import WIDTH, compile_kernel
from megatrain.optim.masters import join_on_device, split_on_device
from megatrain.optim.pool import WorkerPool
from megatrain.optim.tasks import ALIGN_NUMEL, Apart, bits_of, check_flat, check_host, run_pieces
from megatrain.optim.updates import RangePlanes, Ranges, RangeStep
from megatrain.optim.vectors import Arguments, vector_code


def update_on_host(pool: WorkerPool, ranges: Ranges, apart: Sequence[Sequence[Apart]] = ()) -> None:
    """Update ranges in host memory; small ones share tasks."""
    pieces: list[Callable[[int, int], None]] = []
    numels = []
    for step, planes in ranges:
        _check(planes)
        check_host("planes", planes.working)
        momentum = planes.state.get("momentum")
        arrays = (
            None if plane is None else bits_of(plane)
            for plane in (planes.working, planes.remainder, momentum, planes.gradient)
        )
        pieces.append(functools.partial(update, _scalars(step), *arrays))
        numels.append(planes.working.numel())
    run_pieces(pool, pieces, numels, ALIGN_NUMEL, apart)


@torch.no_grad()
def update_on_device(device: torch.device, ranges: Ranges) -> None:
    """Update ranges on a device by torch's operations, bit for bit as on the host."""
    for step, planes in ranges:
        _check(planes)
        tensors = (planes.working, planes.remainder, planes.state.get("momentum"), planes.gradient)
        for start in range(0, planes.working.numel(), UPDATE_CHUNK_NUMEL):
            chunk = slice(start, start + UPDATE_CHUNK_NUMEL)
            _update_chunk(_scalars(step), *(None if plane is None else plane[chunk] for plane in tensors))


def why_not_fused(kind: str) -> str | None:
    """Return why torch's operations update blocks on a kind of device: on every one they do."""
    return f"sign-SGD has no kernel of its own on {kind}"


def _scalars(step: RangeStep) -> tuple[Any, ...]:
    """Return the factors of an update, computed in fp64 and rounded once, as torch does."""
    lr, beta = step.hyper["lr"], step.hyper.get("betas", (0.0,))[0]
    exact = (step.grad_scale, 1 - lr * step.hyper["weight_decay"], beta, 1 - beta, -lr)
    return tuple(map(np.float32, exact))


def _check(planes: RangePlanes) -> None:
    """Assert sizes and contiguity: the kernels trust them."""
    tensors = {"working": planes.working, "gradient": planes.gradient, **planes.state}
    if planes.remainder is not None:
        tensors["remainder"] = planes.remainder
    for name, plane in tensors.items():
        check_flat(name, plane)
        assert plane.numel() == planes.working.numel(), f"{name} has {plane.numel()} elements"


def _update_chunk(
    scalars: tuple[Any, ...],
    working: Tensor | None,
    remainder: Tensor | None,
    momentum: Tensor | None,
    gradient: Tensor | None,
) -> None:
    """Do to one chunk what `update` does, operation by operation."""
    assert working is not None
    assert gradient is not None
    grad_scale, decay, beta, weight, step_size = map(float, scalars)
    mean = gradient.to(torch.float32, copy=True).mul_(grad_scale)
    if momentum is not None:
        mean.mul_(weight).add_(momentum.to(torch.float32, copy=True).mul_(beta))
        momentum.copy_(mean)
    step = mean.sign_().mul_(step_size)
    if remainder is None:
        working.mul_(decay).add_(step)
        return
    master = torch.empty_like(step)
    join_on_device(working, remainder, master)
    # NaNs as AdamW stores them on devices: see `adamw.device`
    master.mul_(decay).add_(step).nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    split_on_device(master, working, remainder, scratch=step)


@vector_code("index scalars", working="index", remainder="index", momentum="index", gradient="index")
def _update_lanes(arguments: Arguments) -> None:
    """Update parameters and their momentum at `index`."""
    grad_scale, decay, beta, weight, step_size = arguments.fill("scalars")
    mean = arguments.load("gradient").widen() * grad_scale
    if arguments["momentum"] is not None:
        before = arguments.load("momentum")
        is_wide = before.value.type == mean.value.type
        mean = mean * weight + before.widen() * beta
        arguments.store(momentum=mean if is_wide else mean.to_bf16())
    zero, one = mean.constant(0.0), mean.constant(1.0)
    sign = mean.where(">", zero, one, mean.where("<", zero, mean.constant(-1.0), zero))
    arguments.store_parameter(arguments.load_parameter() * decay + sign * step_size)


_update_vector, _update_one = _update_lanes(WIDTH), _update_lanes(1)


@compile_kernel
def update(scalars, working, remainder, momentum, gradient, start, stop):  # type: ignore[no-untyped-def]
    """Update elements [start, stop) of the planes, in place.

    Args:
        scalars: The five factors of `_scalars`, np.float32 each.
        working: float32 masters, or the bits of bf16 working weights as int16.
        remainder: None, or the int16 remainders that go with bf16 working weights.
        momentum: None, float32, or bf16 bits as int16.
        gradient: float32, or bf16 bits as int16.
        start: The index of the first element.
        stop: The index one past the last element.
    """
    tail = stop - (stop - start) % WIDTH
    for index in range(start, tail, WIDTH):
        _update_vector(index, scalars, working, remainder, momentum, gradient)
    for index in range(tail, stop):
        _update_one(index, scalars, working, remainder, momentum, gradient)
