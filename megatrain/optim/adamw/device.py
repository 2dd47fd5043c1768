"""AdamW on flat planes on any device, in torch operations, bit for bit what the host kernel computes.

For blocks whose state lies on the device: where a step updates some blocks there and some on the host, the
result must not tell which. Equal means every bit of every number, signs of zeros and denormals included; a
NaN is a NaN in the same place, but its bits are the machine's own (x86, Arm and NVIDIA differ), so a NaN
master is stored as 0x7fc00000: NVIDIA's 0x7fffffff would round to a working weight of -0.0 and vanish.

What the exactness rests on:

1. Single fp32 operations (add, subtract, multiply, divide of two tensors) are IEEE's, denormals kept. So are
   torch's eager kernels on the CPU and CUDA, which are compiled without fast math. Where a product is
   rounded, its sum is an operation of its own (a compiler may contract `addcmul`, `addcdiv` and `lerp`), and
   nothing divides a tensor by a Python number: CUDA multiplies by the reciprocal there.
2. Python numbers are float32 values (`AdamWStep.scalars`), hence exact in the type of any operation.
3. The fused multiply-adds are `multiply_add`, which says why it is exact.
4. Square roots, and quotients by the bias correction, are computed in fp64 and narrowed. That gives the
   rounded fp32 result, since 53 >= 2 * 24 + 2 and none is denormal. For the root even 3 wrong last places of
   fp64 do no harm: none comes nearer than 4 to the middle of two floats. It matters: torch's own root on the
   CPU is not correctly rounded.

Source: When is double rounding innocuous? (Figueroa, 1995); Emulation of FMA and correctly rounded sums:
proved algorithms using rounding to odd (Boldo and Melquiond, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.layout.pools import UPDATE_CHUNK_NUMEL
from megatrain.optim.adamw import device_moments
from megatrain.optim.adamw.host import AdamWStep, Planes
from megatrain.optim.masters import join_on_device, split_on_device


@dataclass(frozen=True, slots=True)
class UpdateScratch:
    """The memory for what lives within one chunk."""

    wide: Tensor
    """(3, N) float64."""
    single: Tensor
    """(2, N) float32."""
    marks: Tensor
    """(3, N) bool."""

    @classmethod
    def allocate(cls, numel: int, device: torch.device) -> UpdateScratch:
        """Take memory for chunks of `numel` elements."""
        return cls(
            torch.empty((3, numel), dtype=torch.float64, device=device),
            torch.empty((2, numel), dtype=torch.float32, device=device),
            torch.empty((3, numel), dtype=torch.bool, device=device),
        )

    def first(self, numel: int) -> UpdateScratch:
        """Return views of the first `numel` elements."""
        return UpdateScratch(self.wide[:, :numel], self.single[:, :numel], self.marks[:, :numel])


@torch.no_grad()
def update_on_device(
    ranges: Iterable[tuple[AdamWStep, Planes]], chunk_numel: int = UPDATE_CHUNK_NUMEL
) -> None:
    """Update ranges in place, bit for bit as `adamw.update_many` does; see the module for what that rests on.

    Runs 55 kernels per chunk on the device's current stream, which move `Optimizer.device_bytes` per element,
    and never waits for it. Scratch memory is `Optimizer.scratch_bytes` (35) per element of the largest
    chunk: 140 MiB for the default. On the CPU, where it exists for tests, torch adds copies where types mix.
    Compressed moments take 8 bytes per element more, and `device_moments.TEMPORARY_BYTES` (40) for a moment,
    in smaller chunks.

    Args:
        ranges: The hyper-parameters and planes of each range, all on one device; ranges must not overlap.
        chunk_numel: The number of elements per pass, at most; the result does not depend on it. Compressed
            moments are cut at multiples of `SCALE_NUMEL`.
    """
    work = [(hyper, planes) for hyper, planes in ranges if planes.working.numel()]
    assert chunk_numel >= 1, f"chunk_numel is {chunk_numel}"
    for _, planes in work:
        planes.check()
    if not work:
        return
    devices = {planes.working.device for _, planes in work}
    assert len(devices) == 1, f"ranges are on {devices}"
    largest = max(planes.working.numel() for _, planes in work)
    scratch = UpdateScratch.allocate(min(largest, chunk_numel), devices.pop())
    for hyper, planes in work:
        scalars = [float(value) for value in hyper.scalars()]
        if planes.exp_avg.dtype != torch.float32:
            _update_compressed(hyper, scalars, planes, scratch, chunk_numel)
            continue
        for start in range(0, planes.working.numel(), chunk_numel):
            chunk = planes.slice(start, start + chunk_numel)
            _update_chunk(scalars, chunk, scratch.first(chunk.working.numel()))


def _update_compressed(
    hyper: AdamWStep, scalars: list[float], planes: Planes, scratch: UpdateScratch, chunk_numel: int
) -> None:
    """Update one range whose moments are compressed: with fp32 moments of a chunk, rounded afterwards."""
    chunk_numel = max(SCALE_NUMEL, chunk_numel // 2 // SCALE_NUMEL * SCALE_NUMEL)
    numel = min(chunk_numel, planes.working.numel())
    if scratch.single.shape[1] < numel:
        scratch = UpdateScratch.allocate(numel, planes.working.device)
    moments = torch.empty((2, numel), dtype=torch.float32, device=planes.working.device)
    first, second, base = hyper.noise
    for start in range(0, planes.working.numel(), chunk_numel):
        chunk = planes.slice(start, min(start + chunk_numel, planes.working.numel()))
        exp_avg, exp_avg_sq = moments[:, : chunk.working.numel()]
        device_moments.load(chunk, exp_avg, exp_avg_sq)
        exact = replace(
            chunk, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, exp_avg_scale=None, exp_avg_sq_scale=None
        )
        _update_chunk(scalars, exact, scratch.first(chunk.working.numel()))
        device_moments.store(chunk, exp_avg, exp_avg_sq, (first, second, base + start))


def multiply_add(a: Tensor, b: Tensor, c: Tensor, out: Tensor, scratch: UpdateScratch) -> None:
    """Write a * b + c, rounded once to fp32.

    In fp64 the product p is exact: 24 + 24 bits, exponents in range. The sum s = p + c - e is rounded, by an
    error e; narrowing s rounds again, and goes wrong only where s is the middle of two floats and p + c is
    not. So s is rounded to odd first: if e is not 0 and the last bit of s is, s moves by one place toward
    p + c. An odd s is neither a float nor the middle of two (their last bits are 0, denormals' too: fp64 has
    29 bits more and smaller exponents), and every one of those lies on the same side of s as of p + c. So s
    narrows to what p + c does.

    The sign of e, without asking which of p and c is larger: s - p is c - e, and s - c is p - e. Rounding is
    monotone, so c - round(c - e) and p - round(p - e) have the sign of e or are 0. If c is the larger, the
    second is e itself, and the first if p is: Dekker's fast two-sum.

    Infinities and NaNs make the differences NaN, comparisons with those are false, and s stays as it is. If
    s is 0, so is e: the sign of a zero is that of p + c rounded once.

    Args:
        a: (N,) float32; or (1,) float64 that holds a float32 value.
        b: (N,) float32.
        c: (N,) float32.
        out: (N,) float32; overwritten. May be `c`.
        scratch: The scratch memory, of N elements; `wide` and `marks` are used.
    """
    total, from_c, from_p = scratch.wide
    inexact, toward_zero, negative = scratch.marks
    total.copy_(c).addcmul_(a, b)  # fp64 because `total` is; contracted or not, the product is exact
    torch.addcmul(total, a, b, value=-1, out=from_c)
    torch.sub(c, from_c, out=from_c)  # c - round(c - e)
    torch.sub(total, c, out=from_p).addcmul_(a, b, value=-1)  # round(p - e) - p: the other sign
    torch.gt(from_c, from_p, out=inexact)  # e > 0
    torch.lt(from_c, from_p, out=toward_zero)  # e < 0: so far, toward zero for positive s
    inexact.logical_or_(toward_zero)
    torch.lt(total, 0, out=negative)
    toward_zero.logical_xor_(negative).logical_and_(inexact)
    # Truncate, then set the last bit: the odd one of the two neighbors of p + c.
    total.view(torch.int64).sub_(toward_zero.view(torch.int8)).bitwise_or_(inexact)
    out.copy_(total)


def _update_chunk(scalars: list[float], planes: Planes, scratch: UpdateScratch) -> None:
    """Do to one chunk what `kernels.update` does, operation by operation."""
    grad_scale, decay, weight1, beta2, weight2, correction2_sqrt, _, eps, step_size = scalars
    m, v = planes.exp_avg, planes.exp_avg_sq
    gradient, other = scratch.single
    wide = scratch.wide[0]

    gradient.copy_(planes.gradient).mul_(grad_scale)
    torch.sub(gradient, m, out=other)
    multiply_add(_wide(weight1, wide), other, m if weight1 > 0 else gradient, m, scratch)
    torch.mul(gradient, weight2, out=other)
    multiply_add(other, gradient, v.mul_(beta2), v, scratch)

    update, denominator = gradient, other
    denominator.copy_(wide.copy_(v).sqrt_())
    denominator.copy_(torch.div(denominator, _wide(correction2_sqrt, wide), out=wide)).add_(eps)
    torch.mul(m, step_size, out=update).div_(denominator)
    if planes.remainder is None:
        planes.working.mul_(decay).add_(update)
        return
    master = other
    join_on_device(planes.working, planes.remainder, master)
    master.mul_(decay).add_(update).nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    split_on_device(master, planes.working, planes.remainder, scratch=update)


def _wide(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor of one dimension: that makes an operation with fp32 tensors an fp64 one."""
    return torch.full((1,), value, dtype=torch.float64, device=like.device)
