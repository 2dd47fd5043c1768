"""Work on flat planes in host memory, cut into tasks for a pool of threads: the cut changes no result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.optim.pool import TASKS_PER_THREAD, WorkerPool

TASK_NUMEL = 1 << 22
"""Elements per task at most: some milliseconds of work. To begin one takes the interpreter's lock, for which
a busy Python thread may keep the others waiting."""
MIN_TASK_NUMEL = 1 << 16
"""Elements per task at least: below it, handing a task over costs more than it saves."""
ALIGN_NUMEL = 64
"""Tasks begin at multiples of this: no two threads write to one cache line of an aligned plane."""


class Apart(NamedTuple):
    """A part of a piece that one thread does by itself, between two calls, which find it in the cache."""

    start: int
    """The first element, at which a task may begin."""
    stop: int
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None


def run_pieces(
    pool: WorkerPool,
    pieces: Sequence[Callable[[int, int], None]],
    numels: Sequence[int],
    align: int,
    apart: Sequence[Sequence[Apart]] = (),
) -> None:
    """Cut pieces of work into tasks of about equal size, several small pieces to one, and run them.

    Args:
        pool: The threads to use.
        pieces: The functions of the pieces, each of which does elements [start, stop) of its own.
        numels: The number of elements of each piece.
        align: The number of elements at multiples of which tasks begin.
        apart: The parts of each piece that are done by themselves, in order; empty: there are none.
    """
    share = sum(numels) // (pool.num_threads * TASKS_PER_THREAD)
    task_numel = max(MIN_TASK_NUMEL, min(TASK_NUMEL, share))
    task_numel = -(-task_numel // align) * align
    tasks: list[list[Callable[[], Any]]] = [[]]
    filled = 0
    for piece, numel, parts in zip(pieces, numels, apart or [()] * len(pieces), strict=True):
        for start, end, part in _stretches(numel, parts):
            while start < end:
                room = end - start if part else max(align, task_numel - filled // align * align)
                stop = min(start + room, end)
                tasks[-1] += _calls(functools.partial(piece, start, stop), part)
                filled += stop - start
                start = stop
                if filled >= task_numel:
                    tasks.append([])
                    filled = 0
    if not tasks[-1]:
        tasks.pop()
    pool.run([calls[0] if len(calls) == 1 else functools.partial(_call_all, calls) for calls in tasks])


def _stretches(numel: int, parts: Iterable[Apart]) -> Iterator[tuple[int, int, Apart | None]]:
    """Yield [start, stop) of what is done by itself and of what lies between, in order."""
    done = 0
    for part in parts:
        yield done, part.start, None
        yield part.start, part.stop, part
        done = part.stop
    yield done, numel, None


def _calls(call: Callable[[], None], part: Apart | None) -> list[Callable[[], Any]]:
    """Return a call with what comes before and after it."""
    found = [call] if part is None else [part.before, call, part.after]
    return [each for each in found if each is not None]


def _call_all(calls: Iterable[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def bits_of(plane: Tensor) -> Any:
    """Return a NumPy view of a plane, bf16 as int16."""
    return all_bits_of(plane)[0]


def all_bits_of(*planes: Tensor | None) -> list[Any]:
    """Return NumPy views of planes, bf16 as int16; None of None."""
    found: list[Any] = []
    for plane in planes:
        if plane is None:
            found.append(None)
            continue
        plane = plane.detach()
        found.append((plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane).numpy())
    return found


def check_flat(name: str, plane: Tensor) -> None:
    """Assert that the kernels can trust a plane to be contiguous and 1-D."""
    flat = plane.dim() == 1 and plane.is_contiguous()
    assert flat, f"{name} is not a flat tensor: {tuple(plane.shape)}, {plane.stride()}"


def check_host(name: str, plane: Tensor) -> None:
    """Assert that it is in host memory."""
    assert plane.device.type == "cpu", f"{name} is on {plane.device}, not in host memory"
