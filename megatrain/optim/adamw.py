"""AdamW on flat planes in host memory, and the sum of squares that clipping needs.

One fused pass over a range: 26 bytes per parameter are moved for a split master with bf16 gradients. Results
equal `torch.optim.AdamW(fused=True)` on fp32 masters bit for bit (the oracle pads each parameter with zeros
to a multiple of 64 elements: torch's own scalar tail rounds differently), whatever the number of threads and
the cut into tasks.

Source: Decoupled Weight Decay Regularization (Loshchilov and Hutter, 2019).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.optim.pool import TASKS_PER_THREAD, WorkerPool

TASK_NUMEL = 1 << 22
"""Elements per task at most: some milliseconds of work. To begin one takes the interpreter's lock, for which
a busy Python thread may keep the others waiting."""
MIN_TASK_NUMEL = 1 << 14
"""Elements per task at least: below it, handing a task over costs more than it saves."""
ALIGN_NUMEL = 64
"""Tasks begin at multiples of this: no two threads write to one cache line of an aligned plane."""
SUM_CHUNK_NUMEL = 1 << 15
"""Elements per partial sum of squares. A constant, so that the order of additions never changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWStep:
    """Hyper-parameters of one update of one range."""

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
    """How many updates the range will have had after this one; at least 1."""
    grad_scale: float = 1.0
    """Factor on the gradient, rounded to fp32, as is the product: `clip.clip_coefficient`. 1: none."""

    def scalars(self) -> tuple[Any, ...]:
        """Return the kernel's factors: computed in fp64, rounded once to np.float32, as torch does."""
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
        return tuple(np.float32(value) for value in exact)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planes:
    """What an update reads and writes: 1-D contiguous tensors of N elements each, all on one device."""

    working: Tensor
    """bfloat16; or float32 where `remainder` is None: then it is the master."""
    remainder: Tensor | None
    """int16: with `working`, the fp32 master (`store.master`)."""
    exp_avg: Tensor
    """float32."""
    exp_avg_sq: Tensor
    """float32."""
    gradient: Tensor
    """bfloat16 or float32; only read."""

    def check(self) -> None:
        """Assert dtypes, sizes, contiguity and one device: the kernels trust them."""
        expected = {
            "working": (torch.float32 if self.remainder is None else torch.bfloat16,),
            "remainder": (torch.int16,),
            "exp_avg": (torch.float32,),
            "exp_avg_sq": (torch.float32,),
            "gradient": (torch.bfloat16, torch.float32),
        }
        for name, dtypes in expected.items():
            plane = getattr(self, name)
            if plane is not None:
                assert plane.dtype in dtypes, f"{name} is {plane.dtype}, not one of {dtypes}"
                _check_flat(name, plane)
                assert plane.numel() == self.working.numel(), f"{name} has {plane.numel()} elements"
                assert plane.device == self.working.device, f"{name} is on {plane.device}"

    def slice(self, start: int, stop: int) -> Planes:
        """Return views of elements [start, stop)."""
        return Planes(
            working=self.working[start:stop],
            remainder=None if self.remainder is None else self.remainder[start:stop],
            exp_avg=self.exp_avg[start:stop],
            exp_avg_sq=self.exp_avg_sq[start:stop],
            gradient=self.gradient[start:stop],
        )


def update(
    pool: WorkerPool,
    hyper: AdamWStep,
    *,
    working: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
) -> None:
    """Update one range in place; see `Planes` for the tensors."""
    planes = Planes(
        working=working, remainder=remainder, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, gradient=gradient
    )
    update_many(pool, [(hyper, planes)])


def update_many(pool: WorkerPool, ranges: Iterable[tuple[AdamWStep, Planes]]) -> None:
    """Update many ranges in place; small ones (norm weights, biases) share tasks.

    Args:
        pool: Threads to use; the result does not depend on their number.
        ranges: Hyper-parameters and planes of each; ranges must not overlap.
    """
    from megatrain.optim import kernels

    pieces: list[Callable[[int, int], None]] = []
    numels = []
    for hyper, planes in ranges:
        planes.check()
        _check_host("planes", planes.working)
        state = planes.working, planes.remainder, planes.exp_avg, planes.exp_avg_sq
        arrays = map(_bits, (*state, planes.gradient))
        pieces.append(functools.partial(kernels.update, hyper.scalars(), *arrays))
        numels.append(planes.working.numel())
    _run(pool, pieces, numels, ALIGN_NUMEL)


def sum_of_squares(pool: WorkerPool, flat: Tensor) -> float:
    """Return the sum of squares of a flat tensor.

    Args:
        pool: Threads to use; the result does not depend on their number.
        flat: (N,) bfloat16 or float32, contiguous, on the CPU.

    Returns:
        The sum, each square exact and all additions in fp64. inf or nan if an element is.
    """
    import numpy as np

    from megatrain.optim import kernels

    assert flat.dtype in (torch.bfloat16, torch.float32), f"gradient is {flat.dtype}"
    _check_flat("gradient", flat)
    _check_host("gradient", flat)
    values = _bits(flat)
    sums = np.zeros(-(-flat.numel() // SUM_CHUNK_NUMEL))
    piece = functools.partial(kernels.sum_squares, values, SUM_CHUNK_NUMEL, sums)
    _run(pool, [piece], [flat.numel()], SUM_CHUNK_NUMEL)
    return math.fsum(sums)


def _run(
    pool: WorkerPool, pieces: Sequence[Callable[[int, int], None]], numels: Sequence[int], align: int
) -> None:
    """Cut pieces of work into tasks of about equal size, several small pieces to one, and run them."""
    share = sum(numels) // (pool.num_threads * TASKS_PER_THREAD)
    task_numel = max(MIN_TASK_NUMEL, min(TASK_NUMEL, share))
    task_numel = -(-task_numel // align) * align
    tasks: list[list[Callable[[], None]]] = [[]]
    filled = 0
    for piece, numel in zip(pieces, numels, strict=True):
        start = 0
        while start < numel:
            stop = min(start + max(align, task_numel - filled // align * align), numel)
            tasks[-1].append(functools.partial(piece, start, stop))
            filled += stop - start
            start = stop
            if filled >= task_numel:
                tasks.append([])
                filled = 0
    pool.run([functools.partial(_call_all, calls) for calls in tasks if calls])


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _bits(plane: Tensor | None) -> Any:
    """Return a NumPy view of the plane, bf16 as int16; None of None."""
    if plane is None:
        return None
    plane = plane.detach()
    return (plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane).numpy()


def _check_flat(name: str, plane: Tensor) -> None:
    flat = plane.dim() == 1 and plane.is_contiguous()
    assert flat, f"{name} is not a flat tensor: {tuple(plane.shape)}, {plane.stride()}"


def _check_host(name: str, plane: Tensor) -> None:
    assert plane.device.type == "cpu", f"{name} is on {plane.device}, not in host memory"
