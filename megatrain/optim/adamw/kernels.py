"""AdamW as Numba kernels: serial, without the GIL, one pass over memory each.

The order of operations is that of torch's fused CPU AdamW. Every operation is rounded to its type and every
fused multiply-add is written out, so results equal `torch.optim.AdamW(fused=True)` bit for bit, on every
machine, vector width and cut of the range. No fastmath: it lets the compiler choose other contractions.

The arithmetic is emitted as LLVM vectors, as that of `optim.kernels`. What bounds the speed besides memory is
the divider and how far ahead the processor can look past it, hence two loops over a tile in L1 in place of
one, and no division by a constant: together 1.2x where bandwidth per core is plenty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from megatrain.optim.kernels import WIDTH, compile_kernel
from megatrain.optim.vectors import VectorLanes, address, fill_all

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


def _parameter(
    parameter: VectorLanes, exp_avg: VectorLanes, denominator: VectorLanes, scalars: list[VectorLanes]
) -> VectorLanes:
    """Return the new parameter."""
    decay, step_size = scalars[1], scalars[-1]
    return parameter * decay + step_size * exp_avg / denominator


def _update_moments(width: int) -> Callable[..., None]:
    """Return an intrinsic: moments of `width` elements at `index`; denominators go to `tile[offset:]`."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        index, offset, scalars, *arrays = arguments
        tile, exp_avg, exp_avg_sq, gradient = (
            address(context, builder, array, value, position)
            for array, value, position in zip(
                signature.args[3:], arrays, (offset, index, index, index), strict=True
            )
        )
        m, v, _, denominator = moments(
            VectorLanes.load(builder, gradient, width).widen(),
            VectorLanes.load(builder, exp_avg, width),
            VectorLanes.load(builder, exp_avg_sq, width),
            fill_all(builder, scalars, width),
        )
        m.store(exp_avg)
        v.store(exp_avg_sq)
        denominator.store(tile)
        return context.get_dummy_value()

    def typed(
        typing: Any, index: Any, offset: Any, scalars: Any, tile: Any, m: Any, v: Any, gradient: Any
    ) -> Any:
        return types.none(index, offset, scalars, tile, m, v, gradient), emit

    return intrinsic(typed)


def _update_parameter(width: int) -> Callable[..., None]:
    """Return an intrinsic: parameters of `width` elements at `index`.

    Denominators are at `tile[offset:]`, and the moment at `exp_avg[place:]`.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        index, offset, place, scalars, *arrays = arguments
        tile, exp_avg, working, remainder = (
            None if array == types.none else address(context, builder, array, value, position)
            for array, value, position in zip(
                signature.args[4:], arrays, (offset, place, index, index), strict=True
            )
        )
        parameter = VectorLanes.load(builder, working, width)
        if remainder is not None:
            parameter = parameter.join(VectorLanes.load(builder, remainder, width))
        parameter = _parameter(
            parameter,
            VectorLanes.load(builder, exp_avg, width),
            VectorLanes.load(builder, tile, width),
            fill_all(builder, scalars, width),
        )
        if remainder is not None:
            parameter, low = parameter.split()
            low.store(remainder)
        parameter.store(working)
        return context.get_dummy_value()

    def typed(
        typing: Any,
        index: Any,
        offset: Any,
        place: Any,
        scalars: Any,
        tile: Any,
        m: Any,
        working: Any,
        remainder: Any,
    ) -> Any:
        return types.none(index, offset, place, scalars, tile, m, working, remainder), emit

    return intrinsic(typed)


_moments_vector, _moments_one = _update_moments(WIDTH), _update_moments(1)
parameter_vector, _parameter_one = _update_parameter(WIDTH), _update_parameter(1)


@compile_kernel
def update(  # type: ignore[no-untyped-def]
    scalars, working, remainder, exp_avg, exp_avg_sq, gradient, start, stop
):
    """Apply AdamW to elements [start, stop) of five planes, in place.

    Args:
        scalars: Nine np.float32, as `AdamWStep.scalars` makes them.
        working: float32 masters, or the bits of bf16 working weights as int16.
        remainder: None, or the int16 remainders that go with bf16 working weights.
        exp_avg: float32.
        exp_avg_sq: float32.
        gradient: float32, or bf16 bits as int16.
        start: First element.
        stop: One past the last element.
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
