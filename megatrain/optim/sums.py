"""Sums over flat gradients in host memory: of squares, for the norm, and of several rounds.

Results do not depend on the number of threads, and additions are those of a device: each is one fp32
addition of the sum so far and a gradient, in the order in which the gradients come.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.layout.ownership import CUT_NUMEL, num_chunks, tree_room
from megatrain.optim.pool import WorkerPool
from megatrain.optim.tasks import ALIGN_NUMEL, bits_of, check_flat, check_host, run_pieces

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUM_CHUNK_NUMEL = CUT_NUMEL
"""Elements per partial sum of squares. A constant, so that the order of additions never changes."""


def sum_of_squares(pool: WorkerPool, flat: Tensor) -> float:
    """Return the sum of squares of a flat tensor.

    Args:
        pool: The threads to use; the result does not depend on their number.
        flat: (N,) bfloat16 or float32, contiguous, on the CPU.

    Returns:
        The sum, with each square exact and all additions in fp64; inf or nan if an element is.
    """
    return math.fsum(squares_of_chunks(pool, flat)) if flat.numel() else 0.0


def squares_of_chunks(pool: WorkerPool, flat: Tensor) -> NDArray[np.float64]:
    """Return the sums of squares of each `SUM_CHUNK_NUMEL` elements; `sum_of_squares` is their exact sum."""
    import numpy as np

    from megatrain.optim import kernels

    _check(flat)
    values = bits_of(flat)
    sums = np.zeros(num_chunks(flat.numel()))
    piece = functools.partial(kernels.sum_squares, values, SUM_CHUNK_NUMEL, sums)
    run_pieces(pool, [piece], [flat.numel()], SUM_CHUNK_NUMEL)
    return sums


def squares_on_device(flats: Iterable[Tensor], out: Tensor, scratch: Tensor) -> None:
    """Write the sum of squares of flat tensors on a device into `out`, without a wait and an allocation.

    In fp64, like `sum_of_squares`, but added in the device's own order: the two differ in the last bits, and
    their norms, which are rounded to fp32, in about one of a million steps. To be squared in fp64 a piece is
    made fp64 first, in `scratch`; torch's norm would make all of the tensor so.

    Args:
        flats: (N,) bfloat16 or float32, each.
        out: The 0-dim float64 tensor.
        scratch: (M + 1,) float64, for pieces of M elements and the root of their sum.
    """
    out.zero_()
    pieces, root = scratch[:-1], scratch[-1]
    for flat in flats:
        for piece in flat.split(len(pieces)):
            if len(piece):
                wide = pieces[: len(piece)].copy_(piece)
                out.addcmul_(torch.linalg.vector_norm(wide, out=root), root)


def chunk_squares_on_device(flat: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Write the sums of squares of each `SUM_CHUNK_NUMEL` elements of a device tensor, without an allocation.

    Halves of a chunk are added element by element, so the bits do not depend on the device, nor on how many
    chunks there are; a reduction of the device's own would give others.

    Args:
        flat: (N,) bfloat16 or float32.
        out: (chunks,) float64, on the device.
        scratch: float64, on the device: room for whole chunks, of which as many are squared at a time.
    """
    at_once = len(scratch) // SUM_CHUNK_NUMEL
    for first in range(0, len(out), at_once):
        part = flat[first * SUM_CHUNK_NUMEL : (first + at_once) * SUM_CHUNK_NUMEL]
        chunks = num_chunks(part.numel())
        squares = scratch[: chunks * SUM_CHUNK_NUMEL]
        squares[part.numel() :].zero_()
        squares[: part.numel()].copy_(part)
        rows = squares.square_().view(chunks, SUM_CHUNK_NUMEL)
        width = SUM_CHUNK_NUMEL
        while width > 1:
            width //= 2
            rows[:, :width] += rows[:, width : 2 * width]
        out[first : first + chunks].copy_(rows[:, 0])


def tree_squares_on_device(
    flats: Iterable[Iterable[Tensor]], out: Tensor, scratch: Tensor, sums: Tensor
) -> None:
    """Write the sum of squares of flat tensors into `out`, by chunks, without a wait and an allocation.

    Args:
        flats: Flat tensors, each in pieces of whole chunks, of which one is looked at before the next is
            asked for.
        out: The 0-dim float64 tensor.
        scratch: As of `chunk_squares_on_device`.
        sums: float64: room for the sums of all chunks of a flat tensor, a power of two.
    """
    out.zero_()
    for flat in flats:
        count = 0
        for piece in flat:
            more = num_chunks(piece.numel())
            chunk_squares_on_device(piece, sums[count : count + more], scratch)
            count += more
        size = tree_room(count)
        sums[count:size].zero_()
        out.add_(_halved(sums[:size]))


def tree_sum(values: Tensor) -> Tensor:
    """Add up a (N,) tensor by a balanced tree of single additions, on its device; return a 0-dim tensor."""
    total = torch.zeros(tree_room(len(values)), dtype=values.dtype, device=values.device)
    total[: len(values)].copy_(values)
    return _halved(total)


def _halved(total: Tensor) -> Tensor:
    """Add the halves of a (2^N,) tensor up in place, until one element is left."""
    while len(total) > 1:
        half = len(total) // 2
        total[:half] += total[half:]
        total = total[:half]
    return total[0]


def add(pool: WorkerPool, gradient: Tensor, sums: Tensor) -> None:
    """Add a gradient to the sum of those before it, in fp32 and in place.

    Args:
        pool: The threads to use; the result does not depend on their number.
        gradient: (N,) bfloat16 or float32.
        sums: (N,) float32.
    """
    from megatrain.optim import kernels

    _check(gradient)
    _check(sums)
    assert gradient.numel() == sums.numel(), f"{gradient.numel()} elements to {sums.numel()}"
    total = bits_of(sums)
    piece = functools.partial(kernels.add, bits_of(gradient), total, total)
    run_pieces(pool, [piece], [sums.numel()], ALIGN_NUMEL)


def add_last(pool: WorkerPool, gradient: Tensor, sums: Tensor, out: Tensor) -> float:
    """Add the last gradient to the sum of those before it, and round it to the working dtype.

    Args:
        pool: The threads to use; the result does not depend on their number.
        gradient: (N,) bfloat16 or float32.
        sums: (N,) float32; only read, if it is not `out`.
        out: (N,) bfloat16 or float32; it may be `sums`.

    Returns:
        The sum of squares of what is then in `out`, as of `sum_of_squares`.
    """
    import numpy as np

    from megatrain.optim import kernels

    for flat in (gradient, sums, out):
        _check(flat)
        assert flat.numel() == sums.numel(), f"{flat.numel()} elements to {sums.numel()}"
    squares = np.zeros(-(-sums.numel() // SUM_CHUNK_NUMEL))
    arrays = bits_of(gradient), bits_of(sums), bits_of(out)
    piece = functools.partial(kernels.add_and_square, *arrays, SUM_CHUNK_NUMEL, squares)
    run_pieces(pool, [piece], [sums.numel()], SUM_CHUNK_NUMEL)
    return math.fsum(squares)


def _check(flat: Tensor) -> None:
    assert flat.dtype in (torch.bfloat16, torch.float32), f"gradient is {flat.dtype}"
    check_flat("gradient", flat)
    check_host("gradient", flat)
