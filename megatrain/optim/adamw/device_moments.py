"""Compressed moments on any device, in torch operations, bit for bit as `compressed` keeps them on the host.

What the exactness rests on is in `device`: single fp32 operations, roots in fp64. The rest is arithmetic on
integers: of 64 bits where the hash needs logical shifts and products of 32 bits, which never overflow there.
Scales that are NaN are all one NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.optim.adamw.codes import (
    HASH_FACTORS,
    HIGH_FACTOR,
    MEAN_SHIFT,
    MEAN_TOP,
    NAN_BITS,
    ONE_BITS,
    ROOT_SHIFT,
    ROOT_TOP,
    SMALLEST_UNIT,
)
from megatrain.optim.adamw.host import Planes

TEMPORARY_BYTES = 40
"""Scratch memory per element that `store` takes and gives back, in bytes, at most."""
_LOW = 0xFFFFFFFF


def load(planes: Planes, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Write both moments in fp32.

    Args:
        planes: The planes, with moments in bf16 or codes.
        exp_avg: (N,) float32; overwritten.
        exp_avg_sq: (N,) float32; overwritten.
    """
    if not planes.has_codes:
        exp_avg.copy_(planes.exp_avg)
        exp_avg_sq.copy_(planes.exp_avg_sq)
        return
    assert planes.exp_avg_scale is not None
    assert planes.exp_avg_sq_scale is not None
    for codes, out, scale in _rows(planes.exp_avg, exp_avg, planes.exp_avg_scale):
        codes = codes.to(torch.int32)
        value = _floats(codes & 0x7F, MEAN_SHIFT).mul_(scale)
        out.view(torch.int32).copy_(codes.bitwise_and_(0x80) << 24).bitwise_or_(value.view(torch.int32))
    for codes, out, scale in _rows(planes.exp_avg_sq, exp_avg_sq, planes.exp_avg_sq_scale):
        root = _floats(codes.to(torch.int32), ROOT_SHIFT).mul_(scale)
        torch.mul(root, root, out=out)


def store(planes: Planes, exp_avg: Tensor, exp_avg_sq: Tensor, noise: tuple[int, int, int]) -> None:
    """Round both moments into their planes.

    Args:
        planes: The planes, with moments in bf16 or codes; these and the scales are overwritten.
        exp_avg: (N,) float32.
        exp_avg_sq: (N,) float32; overwritten.
        noise: The two words of key, and the index of the first element in its parameter.
    """
    random = random_bits(noise, exp_avg.numel(), exp_avg.device)
    if not planes.has_codes:
        _round_to_bf16(exp_avg, random >> 16, planes.exp_avg)
        _round_to_bf16(exp_avg_sq, random.bitwise_and_(0xFFFF), planes.exp_avg_sq)
        return
    assert planes.exp_avg_scale is not None
    assert planes.exp_avg_sq_scale is not None
    upper, lower = (random >> (32 - MEAN_SHIFT)).to(torch.int32), random.bitwise_and_(0xFFFF).to(torch.int32)
    del random
    for mean, bits, codes, scale in _rows(exp_avg, upper, planes.exp_avg, planes.exp_avg_scale):
        inverse = _set_units(mean, MEAN_TOP, scale)
        codes.copy_(_mean_codes(mean, inverse, bits))
    del upper
    exp_avg_sq.copy_(exp_avg_sq.double().sqrt_())
    for root, bits, codes, scale in _rows(exp_avg_sq, lower, planes.exp_avg_sq, planes.exp_avg_sq_scale):
        inverse = _set_units(root, ROOT_TOP, scale)
        codes.copy_(_root_codes(root, inverse, bits))


def random_bits(noise: tuple[int, int, int], numel: int, device: torch.device) -> Tensor:
    """Return (numel,) int64: the 32 random bits of each element, as `compressed` draws them."""
    first, second, base = noise
    x = torch.arange(base, base + numel, dtype=torch.int64, device=device)
    key = (x >> 32).mul_(HIGH_FACTOR).add_(second)
    x.bitwise_and_(_LOW).bitwise_xor_(first)
    x.bitwise_xor_(x >> 16)
    x.mul_(HASH_FACTORS[0]).bitwise_and_(_LOW)
    x.bitwise_xor_(x >> 15)
    x.add_(key).bitwise_and_(_LOW)
    x.mul_(HASH_FACTORS[1] - 2**32).bitwise_and_(_LOW)  # the same mod 2^32, and below 2^63
    return x.bitwise_xor_(x >> 16)


def _rows(*planes: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """View planes as rows of one scale each; the last plane is that of scales. Shorter rows come apart."""
    *flat, scales = planes
    whole = flat[0].numel() // SCALE_NUMEL
    edge = whole * SCALE_NUMEL
    if whole:
        yield *(plane[:edge].view(whole, SCALE_NUMEL) for plane in flat), scales[:whole].view(whole, 1)
    if edge < flat[0].numel():
        yield *(plane[edge:].view(1, -1) for plane in flat), scales[whole:].view(1, 1)


def _set_units(values: Tensor, top: float, scale: Tensor) -> Tensor:
    """Write the units of rows to `scale`, and return the inverse units, (rows, 1)."""
    torch.amax(values.abs(), dim=1, keepdim=True, out=scale)
    # tensors divide: CUDA would multiply by the reciprocal of a Python number
    scale.div_(torch.full_like(scale, top))
    scale.copy_(torch.where(scale < SMALLEST_UNIT, torch.full_like(scale, SMALLEST_UNIT), scale))
    _one_nan(scale)
    return torch.ones_like(scale).div_(scale)


def _one_nan(values: Tensor) -> None:
    bits = values.view(torch.int32)
    bits.copy_(torch.where(values.isnan(), torch.full_like(bits, NAN_BITS), bits))


def _floats(codes: Tensor, shift: int) -> Tensor:
    """Return what codes without a sign, int32, stand for in units; the codes are overwritten."""
    return codes.bitwise_left_shift_(shift).add_(ONE_BITS).view(torch.float32).sub_(1.0)


def _magnitude_bits(values: Tensor) -> Tensor:
    return values.view(torch.int32).bitwise_and_(0x7FFFFFFF)


def _mean_codes(mean: Tensor, inverse: Tensor, random: Tensor) -> Tensor:
    number = mean.abs().mul_(inverse).add_(1.0)
    code = _magnitude_bits(number).sub_(ONE_BITS).add_(random).bitwise_right_shift_(MEAN_SHIFT)
    return code.clamp_(max=0x7F).bitwise_or_((mean < 0).to(torch.int32) << 7)


def _root_codes(root: Tensor, inverse: Tensor, random: Tensor) -> Tensor:
    scaled = root * inverse
    floor = _magnitude_bits(scaled + 1.0).sub_(ONE_BITS).bitwise_right_shift_(ROOT_SHIFT)
    low, high = _floats(floor.clone(), ROOT_SHIFT), _floats(floor + 1, ROOT_SHIFT)
    share = random.bitwise_left_shift_(7).bitwise_or_(ONE_BITS + 0x40).view(torch.float32).sub_(1.0)
    threshold = (high - low).mul_(high.add_(low)).mul_(share)
    distance = scaled.add(low).mul_(scaled.sub_(low))
    floor.add_(threshold < distance)
    return torch.maximum(floor, (root > 0).to(torch.int32)).clamp_(max=0xFF)


def _round_to_bf16(values: Tensor, random: Tensor, out: Tensor) -> None:
    """Round stochastically; a NaN becomes the one that `compressed` writes."""
    bits = values.view(torch.int32).to(torch.int64).bitwise_and_(_LOW)
    rounded = bits.add_(random).bitwise_right_shift_(16)
    rounded.masked_fill_(values.isnan(), NAN_BITS >> 16)
    out.view(torch.int16).copy_(rounded)
