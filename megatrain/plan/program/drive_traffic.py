"""Reads of drives ahead of the operations that need them, and writes behind those that make them.

Buffers are used in turn, so what is read k-th goes into the buffer that the (k - n)-th has left: as early as
n buffers allow, and no earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from megatrain.layout import pools
from megatrain.layout.host_buffers import NUM_ACTIVATION_STAGING
from megatrain.plan.program.kinds import Kind
from megatrain.plan.program.operations import Operation


def with_state_through(
    operations: Sequence[Operation],
    on_drives: Collection[int],
    sizes: Sequence[int] | Mapping[int, int],
    num_buffers: int,
) -> list[Operation]:
    """Read the state of blocks on drives before their updates, and write it after: all ranks' updates.

    Args:
        operations: With the updates, in order.
        on_drives: Blocks whose remainder and moments are there.
        sizes: By block: bytes that cross each way.
        num_buffers: Host buffers, used in turn.
    """

    def is_ours(operation: Operation) -> bool:
        return operation.kind is Kind.UPDATE and operation.block in on_drives

    def surround(operation: Operation, buffer: int) -> tuple[Operation, list[Operation]]:
        common = {"block": operation.block, "drive_staging": buffer, "nbytes": sizes[operation.block]}
        read, write = (Operation(kind=kind, **common) for kind in (Kind.READ, Kind.WRITE))  # type: ignore[arg-type]
        after = [operation, *(spreads[block] for block in [operation.block] if block in spreads)]
        return read, [*(replace(one, drive_staging=buffer) for one in after), write]

    def is_spread(operation: Operation) -> bool:
        return operation.kind is Kind.SPREAD and operation.block in on_drives

    spreads = {operation.block: operation for operation in operations if is_spread(operation)}
    others = [operation for operation in operations if not is_spread(operation)]
    return _read_ahead(others, is_ours, surround, num_buffers)


def with_weights_through(
    operations: Sequence[Operation], on_drives: Collection[int], sizes: Sequence[int], num_buffers: int
) -> list[Operation]:
    """Read the weights of blocks on drives before they are fetched to the device; as `with_state_through`."""

    def is_ours(operation: Operation) -> bool:
        return operation.kind is Kind.FETCH and operation.block in on_drives

    def surround(operation: Operation, buffer: int) -> tuple[Operation, list[Operation]]:
        read = Operation(kind=Kind.PAGE, block=operation.block, page=buffer, nbytes=sizes[operation.block])
        return read, [replace(operation, page=buffer)]

    return _read_ahead(operations, is_ours, surround, num_buffers)


def _read_ahead(
    operations: Sequence[Operation],
    is_ours: Callable[[Operation], bool],
    surround: Callable[[Operation, int], tuple[Operation, list[Operation]]],
    num_buffers: int,
) -> list[Operation]:
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


def with_activations_through(
    operations: Sequence[Operation], rooms: Mapping[int, int], num_buffers: int = NUM_ACTIVATION_STAGING
) -> list[Operation]:
    """Write what is saved on to the drives, and read it back ahead of its RESTORE.

    One buffer is for what is being restored; as many visits as there are others are read ahead, from the
    first backward on, and none before it was written.

    Args:
        operations: With SAVEs and RESTOREs, in order.
        rooms: By block: the room on the host of what a micro-batch saves.
        num_buffers: Host buffers through which it passes.
    """
    upcoming = deque(operation for operation in operations if operation.kind is Kind.RESTORE)
    stowed: dict[tuple[int, int], Operation] = {}
    """What the drives hold, by block and micro-batch: the operation that has saved it."""
    recalled: dict[tuple[int, int], int] = {}
    """The buffer in which it is again."""
    free = deque(range(num_buffers))
    result: list[Operation] = []

    def recall(restore: Operation) -> None:
        visit = restore.block, restore.micro_batch
        saved = stowed.pop(visit)
        recalled[visit] = free.popleft()
        count = restore.nbytes * saved.num_micro_batches // saved.nbytes if saved.nbytes else 0
        nbytes = count * pools.saved_buffer(rooms[saved.block])
        result.append(replace(saved, kind=Kind.RECALL, activation_staging=recalled[visit], nbytes=nbytes))

    def read_ahead() -> None:
        for restore in list(islice(upcoming, len(recalled), num_buffers - 1)):
            if (restore.block, restore.micro_batch) not in stowed:
                return
            recall(restore)

    for operation in operations:
        visit = operation.block, operation.micro_batch
        if operation.kind in (Kind.BACKWARD, Kind.HEAD_BACKWARD):
            read_ahead()
        elif operation.kind is Kind.RESTORE and visit in stowed:
            recall(operation)
        if operation.kind is Kind.SAVE:
            stowed[visit] = replace(operation, activation_staging=free[0])
            nbytes = operation.num_micro_batches * pools.saved_buffer(rooms[operation.block])
            result += [stowed[visit], replace(stowed[visit], kind=Kind.STOW, nbytes=nbytes)]
            free.rotate(-1)
        elif operation.kind is Kind.RESTORE:
            upcoming.popleft()
            free.append(recalled.pop(visit))
            result.append(replace(operation, activation_staging=free[-1]))
            read_ahead()
        else:
            result.append(operation)
    return result
