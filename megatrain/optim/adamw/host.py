"""AdamW on flat planes in host memory.

One fused pass over a range: 26 bytes per parameter are moved for a split master with bf16 gradients. Results
equal `torch.optim.AdamW(fused=True)` on fp32 masters bit for bit (the oracle pads each parameter with zeros
to a multiple of 64 elements: torch's own scalar tail rounds differently), whatever the number of threads and
the cut into tasks. With moments in bf16 or int8 (`compressed`: not exact) they depend on the gradients and
on `AdamWStep.noise` alone.

Source: Decoupled Weight Decay Regularization (Loshchilov and Hutter, 2019).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.optim.pool import WorkerPool
from megatrain.optim.tasks import ALIGN_NUMEL, Apart, all_bits_of, check_flat, check_host, run_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWStep:
    """The hyper-parameters of one update of one range."""

    lr: float
    """Learning rate of this step."""
    beta1: float
    """Decay of the mean of gradients."""
    beta2: float
    """Decay of the mean of squared gradients."""
    eps: float
    """Added to the denominator."""
    weight_decay: float
    """Decoupled: each step takes `lr * weight_decay` of the weight off it."""
    step: int
    """The number of updates that the range will have had after this one; at least 1."""
    grad_scale: float = 1.0
    """Factor on the gradient, rounded to fp32, as is the product: `clip.clip_coefficient`. 1: none."""

    noise: tuple[int, int, int] = (0, 0, 0)
    """The source of the rounding of compressed moments: two words of key (`updates.rounding_key`), and
    the index of the range's first element in its parameter, a multiple of 64."""

    def scalars(self) -> tuple[Any, ...]:
        """Return the factors of the kernel: computed in fp64, rounded once to np.float32, as torch does."""
        import numpy as np

        assert self.step >= 1, f"step is {self.step}"
        correction1 = 1 - self.beta1**self.step
        correction2 = 1 - self.beta2**self.step
        weight1 = np.float32(1 - self.beta1)
        correction2_sqrt = np.float32(math.sqrt(correction2))
        exact = (
            self.grad_scale,
            1 - self.lr * self.weight_decay,
            # torch's lerp: from the old mean toward the gradient, or, where that is nearer, from the gradient
            # back.
            weight1 if weight1 < 0.5 else weight1 - np.float32(1),
            self.beta2,
            1 - self.beta2,
            correction2_sqrt,
            np.float32(1) / correction2_sqrt,
            self.eps,
            -(self.lr / correction1),
        )
        return tuple(map(np.float32, exact))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planes:
    """The planes that an update reads and writes: 1-D contiguous tensors of N elements, all on one device."""

    working: Tensor
    """bfloat16; or float32 where `remainder` is None: then it is the master."""
    remainder: Tensor | None
    """int16: with `working`, the fp32 master (`store.master`)."""
    exp_avg: Tensor
    """float32, bfloat16, or uint8 codes."""
    exp_avg_sq: Tensor
    """float32, bfloat16, or uint8 codes."""
    gradient: Tensor
    """bfloat16 or float32; only read."""
    exp_avg_scale: Tensor | None = None
    """float32, one per `SCALE_NUMEL` elements; only with codes."""
    exp_avg_sq_scale: Tensor | None = None
    """float32, one per `SCALE_NUMEL` elements; only with codes."""

    @property
    def has_codes(self) -> bool:
        """Return whether the moments are codes of 8 bits."""
        return self.exp_avg.dtype == torch.uint8

    def check(self) -> None:
        """Assert dtypes, sizes, contiguity and one device: the kernels trust them."""
        mean = self.exp_avg.dtype
        assert mean in (torch.float32, torch.bfloat16, torch.uint8), f"exp_avg is {mean}"
        expected = {
            "working": (torch.float32 if self.remainder is None else torch.bfloat16,),
            "remainder": (torch.int16,),
            "exp_avg_sq": (mean,),
            "gradient": (torch.bfloat16, torch.float32),
            "exp_avg": (mean,),
        }
        for name, dtypes in expected.items():
            plane = getattr(self, name)
            if plane is not None:
                assert plane.dtype in dtypes, f"{name} is {plane.dtype}, not one of {dtypes}"
                assert plane.dim() == 1, f"{name} is not flat: {tuple(plane.shape)}"
                assert plane.is_contiguous(), f"{name} is not contiguous: {plane.stride()}"
                assert plane.numel() == self.working.numel(), f"{name} has {plane.numel()} elements"
                assert plane.device == self.working.device, f"{name} is on {plane.device}"
        if mean != torch.float32:
            assert self.working.numel() % ALIGN_NUMEL == 0, f"{self.working.numel()} elements"
        has_codes = mean == torch.uint8
        for scale in (self.exp_avg_scale, self.exp_avg_sq_scale):
            assert (scale is not None) == has_codes, "scales go with codes"
            if scale is not None:
                check_flat("scale", scale)
                assert scale.dtype == torch.float32, f"scale is {scale.dtype}"
                assert scale.numel() == -(-self.working.numel() // SCALE_NUMEL), f"{scale.numel()} scales"
                assert scale.device == self.working.device, f"scale is on {scale.device}"

    def slice(self, start: int, stop: int) -> Planes:
        """Return views of elements [start, stop); codes are cut at multiples of `SCALE_NUMEL`."""
        cut, scales = slice(start, stop), slice(start // SCALE_NUMEL, -(-stop // SCALE_NUMEL))

        def part(name: str) -> Any:
            plane = getattr(self, name)
            return None if plane is None else plane[scales if name.endswith("_scale") else cut]

        return Planes(**{field.name: part(field.name) for field in fields(self)})


def update_many(
    pool: WorkerPool,
    ranges: Iterable[tuple[AdamWStep, Planes]],
    apart: Sequence[Sequence[Apart]] = (),
) -> None:
    """Update many ranges in place; small ones (norm weights, biases) share tasks.

    Args:
        pool: The threads to use; the result does not depend on their number.
        ranges: The hyper-parameters and planes of each range; ranges must not overlap.
        apart: The parts of each range that one thread updates by itself; empty: there are none.
    """
    pieces: list[Callable[[int, int], None]] = []
    numels = []
    align = ALIGN_NUMEL
    for hyper, planes in ranges:
        planes.check()
        check_host("planes", planes.working)
        pieces.append(_kernel(hyper, planes))
        numels.append(planes.working.numel())
        if planes.exp_avg_scale is not None:
            align = max(align, SCALE_NUMEL)
    run_pieces(pool, pieces, numels, align, apart)


def _kernel(hyper: AdamWStep, planes: Planes) -> Callable[[int, int], None]:
    """Return the call that updates elements [start, stop) of a range."""
    from megatrain.optim.adamw import kernels

    state = all_bits_of(planes.working, planes.remainder, planes.exp_avg, planes.exp_avg_sq)
    (gradient,) = all_bits_of(planes.gradient)
    if planes.exp_avg.dtype == torch.float32:
        return functools.partial(kernels.update, hyper.scalars(), *state, gradient)
    from megatrain.optim.adamw import compressed

    assert hyper.noise[2] % ALIGN_NUMEL == 0, f"the range begins at element {hyper.noise[2]}"
    kernel = compressed.update_int8 if planes.has_codes else compressed.update_bf16
    scales = [] if planes.exp_avg_scale is None else [planes.exp_avg_scale, planes.exp_avg_sq_scale]
    arrays = *state, *all_bits_of(*scales), gradient
    return functools.partial(kernel, hyper.scalars(), hyper.noise, *arrays)
