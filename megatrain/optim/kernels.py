"""AdamW and sums of gradients as Numba kernels: serial, without the GIL, one pass over memory each.

The order of operations is that of torch's fused CPU AdamW. Every operation is rounded to its type and every
fused multiply-add is written out, so results equal `torch.optim.AdamW(fused=True)` bit for bit, on every
machine, vector width and cut of the range. No fastmath: it lets the compiler choose other contractions.

The arithmetic is emitted as LLVM vectors of `WIDTH` lanes, which LLVM maps to what the machine has (two AVX2
registers, one AVX-512, four NEON); left to itself it keeps a loop over five arrays that might overlap scalar.
What bounds the speed besides memory is the divider and how far ahead the processor can look past it, hence
two loops over a tile in L1 in place of one, and no division by a constant: together 1.2x where bandwidth per
core is plenty. Importing this module imports Numba (half a second): import it where it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from megatrain.optim.vectors import F32, F64, I32, VectorLanes, address, fill_all

WIDTH = 16
"""Elements per vector: 64 bytes of fp32, a cache line."""
TILE = 512
"""Elements whose moments are updated before their parameters are: 11 kB in all, a part of any L1."""

_logger = logging.getLogger(__name__)


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


def _sum_squares(width: int) -> Callable[..., float]:
    """Return an intrinsic that sums squares over [start, stop), whole vectors, in `width` fp64 lanes."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        start, stop, values = arguments
        zeros = ir.Constant(ir.VectorType(F64, width), [0.0] * width)
        lanes = cgutils.alloca_once_value(builder, zeros)
        step = ir.Constant(start.type, width)
        with cgutils.for_range_slice(builder, start, stop, step, start.type) as (index, _):
            pointer = address(context, builder, signature.args[2], values, index)
            numbers = VectorLanes.load(builder, pointer, width).widen_twice()
            total = numbers.times_plus(numbers, VectorLanes(builder, builder.load(lanes)))
            builder.store(total.value, lanes)
        total = builder.load(lanes)
        while total.type.count > 1:  # halves are added, so the order does not depend on the machine's vectors
            half = total.type.count // 2
            low, high = (
                builder.shuffle_vector(
                    total, total, ir.Constant(ir.VectorType(I32, half), list(range(first, first + half)))
                )
                for first in (0, half)
            )
            total = builder.fadd(low, high)
        return builder.extract_element(total, I32(0))

    def typed(typing: Any, start: Any, stop: Any, values: Any) -> Any:
        return types.float64(start, stop, values), emit

    return intrinsic(typed)


def _add(width: int) -> Callable[..., None]:
    """Return an intrinsic: `width` values at `index` are added to those of `sums`, and rounded to `out`'s."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        index, *arrays = arguments
        values, sums, out = (
            address(context, builder, array, value, index)
            for array, value in zip(signature.args[1:], arrays, strict=True)
        )
        loaded = VectorLanes.load(builder, values, width).widen()
        total = VectorLanes.load(builder, sums, width) + loaded
        (total if out.type.pointee == F32 else total.to_bf16()).store(out)
        return context.get_dummy_value()

    def typed(typing: Any, index: Any, values: Any, sums: Any, out: Any) -> Any:
        return types.none(index, values, sums, out), emit

    return intrinsic(typed)


_moments_vector, _moments_one = _update_moments(WIDTH), _update_moments(1)
parameter_vector, _parameter_one = _update_parameter(WIDTH), _update_parameter(1)
_sum_squares_vector, _sum_squares_one = _sum_squares(2 * WIDTH), _sum_squares(1)
_add_vector, _add_one = _add(WIDTH), _add(1)


def compile_kernel(kernel: Callable[..., Any]) -> Any:
    """Compile on the first call for each set of types, and keep the result on disk where that is possible."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(kernel)
    except RuntimeError as error:  # no writable folder: neither __pycache__ nor the user's cache
        _logger.warning("compiled kernels are not kept, each start takes seconds longer: %s", error)
        return njit(**options)(kernel)


@compile_kernel
def update(  # type: ignore[no-untyped-def]
    scalars, working, remainder, exp_avg, exp_avg_sq, gradient, start, stop
):
    """Apply AdamW to elements [start, stop) of five planes, in place.

    Args:
        scalars: Nine np.float32, as `adamw.AdamWStep.scalars` makes them.
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


@compile_kernel
def sum_squares(values, chunk, sums, start, stop):  # type: ignore[no-untyped-def]
    """Write the sum of squares of each chunk of elements [start, stop) to `sums`.

    Args:
        values: float32, or bf16 bits as int16.
        chunk: Elements per sum; the last one may be shorter.
        sums: float64, one per chunk of the whole of `values`; overwritten from `start // chunk` on.
        start: First element, a multiple of `chunk`.
        stop: One past the last element.
    """
    for first in range(start, stop, chunk):
        last = min(first + chunk, stop)
        tail = last - (last - first) % (2 * WIDTH)
        sums[first // chunk] = _sum_squares_vector(first, tail, values) + _sum_squares_one(tail, last, values)


@compile_kernel
def add(values, sums, out, start, stop):  # type: ignore[no-untyped-def]
    """Write `sums` + `values`, an fp32 addition, to elements [start, stop) of `out`.

    Args:
        values: float32, or bf16 bits as int16.
        sums: float32.
        out: float32, and then perhaps `sums` itself; or bf16 bits as int16, rounded to nearest even.
        start: First element.
        stop: One past the last element.
    """
    tail = stop - (stop - start) % WIDTH
    for index in range(start, tail, WIDTH):
        _add_vector(index, values, sums, out)
    for index in range(tail, stop):
        _add_one(index, values, sums, out)


@compile_kernel
def add_and_square(values, sums, out, chunk, squares, start, stop):  # type: ignore[no-untyped-def]
    """Do `add`, and `sum_squares` of what is then in `out`, a chunk at a time: it is still in the cache."""
    for first in range(start, stop, chunk):
        last = min(first + chunk, stop)
        add(values, sums, out, first, last)
        sum_squares(out, chunk, squares, first, last)
