"""Reads of drives ahead of the operations that need them.

Buffers are used in turn, so what is read k-th goes into the buffer that the (k - n)-th has left: as early as
n buffers allow, and no earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.plan.program.operations import Operation


def read_ahead(
    operations: Sequence[Operation],
    is_ours: Callable[[Operation], bool],
    surround: Callable[[Operation, int], tuple[Operation, list[Operation]]],
    num_buffers: int,
) -> list[Operation]:
    """List operations with the reads before those that need them.

    Args:
        operations: The program, in order.
        is_ours: A function that returns whether an operation needs a read.
        surround: A function that returns the read for an operation and a buffer, and what takes the
            operation's place.
        num_buffers: The number of host buffers, used in turn.
    """
    numbers = {place: n for n, place in enumerate(p for p, op in enumerate(operations) if is_ours(op))}
    pairs = [surround(operations[place], number % num_buffers) for place, number in numbers.items()]
    result = [read for read, _ in pairs[:num_buffers]]
    for place, operation in enumerate(operations):
        if place not in numbers:
            result.append(operation)
            continue
        number = numbers[place]
        result += pairs[number][1]
        result += [read for read, _ in pairs[number + num_buffers : number + num_buffers + 1]]
    return result
