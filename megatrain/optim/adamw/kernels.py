"""AdamW as Numba kernels: serial, without the GIL, one pass over memory each.

The order of operations is that of torch's fused CPU AdamW. Every operation is rounded to its type and every
fused multiply-add is written out, so results equal `torch.optim.AdamW(fused=True)` bit for bit, on every
machine, vector width and cut of the range. No fastmath: it lets the compiler choose other contractions.

The arithmetic is emitted as LLVM vectors, as that of `optim.kernels`. What bounds the speed besides memory is
the divider and how far ahead the processor can look past it, hence two loops over a tile in L1 in place of
one, and no division by a constant: together 1.2x where bandwidth per core is plenty.
"""

from __future__ import annotations

import numpy as np

from megatrain.optim.kernels import WIDTH, compile_kernel
from megatrain.optim.vectors import Arguments, VectorLanes, vector_code

TILE = 512
"""Elements whose moments are updated before their parameters are: 11 kB in all, a part of any L1."""


def moments(
    gradient: VectorLanes, exp_avg: VectorLanes, exp_avg_sq: VectorLanes, scalars: list[VectorLanes]
) -> tuple[VectorLanes, ...]:
    """Return the new exp_avg and exp_avg_sq, the root of the latter, and the denominator of the update."""
    grad_scale, _, weight1, beta2, weight2, correction2_sqrt, reciprocal, eps, _ = scalars
    gradient = gradient * grad_scale
    exp_avg = weight1.times_plus(gradient - exp_avg, weight1.where_positive(exp_avg, gradient))
    exp_avg_sq = (weight2 * gradient).times_plus(gradient, exp_avg_sq * beta2)
    root = exp_avg_sq.sqrt()
    return exp_avg, exp_avg_sq, root, root.divide_by(correction2_sqrt, reciprocal) + eps


@vector_code("index offset scalars", tile="offset", exp_avg="index", exp_avg_sq="index", gradient="index")
def _update_moments(arguments: Arguments) -> None:
    """Update moments at `index`; the denominators go to `tile[offset:]`."""
    exp_avg, exp_avg_sq, _, denominator = moments(
        arguments.load("gradient").widen(),
        arguments.load("exp_avg"),
        arguments.load("exp_avg_sq"),
        arguments.fill("scalars"),
    )
    arguments.store(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, tile=denominator)


@vector_code("index offset place scalars", tile="offset", exp_avg="place", working="index", remainder="index")
def _update_parameter(arguments: Arguments) -> None:
    """Update parameters at `index`, by denominators at `tile[offset:]` and moments at `exp_avg[place:]`."""
    scalars = arguments.fill("scalars")
    decay, step_size = scalars[1], scalars[-1]
    parameter = arguments.load_parameter() * decay
    arguments.store_parameter(parameter + step_size * arguments.load("exp_avg") / arguments.load("tile"))


_moments_vector, _moments_one = _update_moments(WIDTH), _update_moments(1)
parameter_vector, _parameter_one = _update_parameter(WIDTH), _update_parameter(1)


@compile_kernel
def update(  # type: ignore[no-untyped-def]
    scalars, working, remainder, exp_avg, exp_avg_sq, gradient, start, stop
):
    """Apply AdamW to elements [start, stop) of five planes, in place.

    Args:
        scalars: The nine factors of `AdamWStep.scalars`, np.float32 each.
        working: float32 masters, or the bits of bf16 working weights as int16.
        remainder: None, or the int16 remainders that go with bf16 working weights.
        exp_avg: float32.
        exp_avg_sq: float32.
        gradient: float32, or bf16 bits as int16.
        start: The index of the first element.
        stop: The index one past the last element.
    """
    tile = np.empty(TILE, np.float32)
    for first in range(start, stop, TILE):
        last = min(first + TILE, stop)
        tail = last - (last - first) % WIDTH
        for index in range(first, tail, WIDTH):
            _moments_vector(index, index - first, scalars, tile, exp_avg, exp_avg_sq, gradient)
        for index in range(tail, last):
            _moments_one(index, index - first, scalars, tile, exp_avg, exp_avg_sq, gradient)
        for index in range(first, tail, WIDTH):
            parameter_vector(index, index - first, index, scalars, tile, exp_avg, working, remainder)
        for index in range(tail, last):
            _parameter_one(index, index - first, index, scalars, tile, exp_avg, working, remainder)
