"""Sums of gradients as Numba kernels: serial, without the GIL, one pass over memory each.

Every operation is rounded to its type and every fused multiply-add is written out, so results are the same on
every machine, vector width and cut of the range. No fastmath: it lets the compiler choose other contractions.

The arithmetic is emitted as LLVM vectors of `WIDTH` lanes, which LLVM maps to what the machine has (two AVX2
registers, one AVX-512, four NEON); left to itself it keeps a loop over five arrays that might overlap scalar.
Importing this module imports Numba (half a second): import it where it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from megatrain.optim.vectors import F32, F64, Arguments, VectorLanes, vector_code

WIDTH = 16
"""Elements per vector: 64 bytes of fp32, a cache line."""
_logger = logging.getLogger(__name__)


@vector_code("start stop", returns=types.float64, values=None)
def _sum_squares(arguments: Arguments) -> ir.Value:
    """Sum squares over [start, stop), whole vectors, in as many fp64 lanes."""
    builder, width = arguments.builder, arguments.width
    start, stop = arguments["start"], arguments["stop"]
    zeros = ir.Constant(ir.VectorType(F64, width), [0.0] * width)
    lanes = cgutils.alloca_once_value(builder, zeros)
    step = ir.Constant(start.type, width)
    with cgutils.for_range_slice(builder, start, stop, step, start.type) as (index, _):
        pointer = builder.gep(arguments["values"], [index])
        numbers = VectorLanes.load(builder, pointer, width).widen_twice()
        total = numbers.times_plus(numbers, VectorLanes(builder, builder.load(lanes)))
        builder.store(total.value, lanes)
    return VectorLanes(builder, builder.load(lanes)).reduce(VectorLanes.__add__)


@vector_code("index", values="index", sums="index", out="index")
def _add(arguments: Arguments) -> None:
    """Add values to those of `sums`, and round to the type of `out`."""
    total = arguments.load("sums") + arguments.load("values").widen()
    is_wide = arguments["out"].type.pointee == F32
    arguments.store(out=total if is_wide else total.to_bf16())


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
def sum_squares(values, chunk, sums, start, stop):  # type: ignore[no-untyped-def]
    """Write the sum of squares of each chunk of elements [start, stop) to `sums`.

    Args:
        values: float32, or bf16 bits as int16.
        chunk: The number of elements per sum; the last one may be shorter.
        sums: float64, one per chunk of the whole of `values`; overwritten from `start // chunk` on.
        start: The index of the first element, a multiple of `chunk`.
        stop: The index one past the last element.
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
        start: The index of the first element.
        stop: The index one past the last element.
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
