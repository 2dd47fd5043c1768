"""A training step as data: which bytes move when, between which buffers, and which slot each block is in.

`schedule` turns a sequence of block visits into a list of operations. Everything else consumes that list: the
engine executes it and asserts that the model's visits match it, the ordering checker proves it, a planner
times it. Waits are not in the list: they follow from the buffers that the operations read and write.

Fetches follow the four rules for one-disk prefetching with a known future: fetch the missing block that is
needed next; into the slot whose content is needed last; never evict what is needed sooner than what comes;
and as early as these allow.

Source: Cao, Felten, Karlin, Li, "A study of integrated prefetching and caching strategies", SIGMETRICS 1995;
eviction by furthest next use: Belady, IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

Buffer: TypeAlias = tuple[str, int]
"""A kind and an index: ("slot", 0), ("gradient_buffer", 1), ("working", block), ("gradient", block), ..."""


class Lane(str, Enum):
    """A queue in which operations run in order. Operations in different lanes run at the same time."""

    COMPUTE = "compute"
    FETCH = "fetch"
    OFFLOAD = "offload"
    HOST = "host"


class Kind(str, Enum):
    """What an operation does."""

    FETCH = "fetch"
    """Copy a block's working weights to the device."""
    FORWARD = "forward"
    """The model passes through a block."""
    BACKWARD = "backward"
    """Autograd passes through a block, with its recomputation if it has one; gradients add up in a buffer."""
    LOAD = "load"
    """Copy what earlier rounds added up to the device, to go on adding."""
    OFFLOAD = "offload"
    """Copy gradients to the host, and sum their squares on the way if they are complete."""
    NORM = "norm"
    """Turn the sums of squares into one scale for the step, or decide to skip it."""
    UPDATE = "update"
    """AdamW on a block's state."""


_LANES = {
    Kind.FETCH: Lane.FETCH,
    Kind.LOAD: Lane.FETCH,
    Kind.FORWARD: Lane.COMPUTE,
    Kind.BACKWARD: Lane.COMPUTE,
    Kind.OFFLOAD: Lane.OFFLOAD,
    Kind.NORM: Lane.HOST,
    Kind.UPDATE: Lane.HOST,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation: what, on which block, through which slot and gradient buffer."""

    kind: Kind
    block: int = -1
    slot: int = -1
    """Slot of a streamed block; -1 where none is involved."""
    gradient_buffer: int = -1
    loads: bool = False
    """The gradient adds to what earlier backwards of the step left."""
    completes: bool = True
    """The gradient is complete after this operation; otherwise it stays in fp32 for a later round."""
    nbytes: int = 0
    """Bytes that cross the link."""
    blocks: tuple[int, ...] = ()
    """NORM only: the blocks whose gradients it is of."""

    @property
    def is_single(self) -> bool:
        """Whether one backward makes the whole gradient, which is then in the working dtype already."""
        return self.completes and not self.loads

    @property
    def lane(self) -> Lane:
        """The lane in which the operation runs."""
        return _LANES[self.kind]

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Buffers that the operation reads."""
        match self.kind:
            case Kind.FETCH:
                return (("working", self.block),)
            case Kind.LOAD:
                return (("gradient", self.block),)
            case Kind.FORWARD | Kind.BACKWARD:
                return (weights_buffer(self.block, self.slot),)
            case Kind.OFFLOAD:
                return (gradients_buffer(self.block, self.gradient_buffer),)
            case Kind.UPDATE:
                return (("gradient", self.block), ("norm", 0))
            case Kind.NORM:
                return tuple(("gradient", block) for block in self.blocks)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Buffers that the operation writes."""
        match self.kind:
            case Kind.FETCH:
                return (weights_buffer(self.block, self.slot),)
            case Kind.LOAD:
                return (gradients_buffer(self.block, self.gradient_buffer),)
            case Kind.FORWARD:
                return ()
            case Kind.BACKWARD:
                return (
                    () if self.gradient_buffer < 0 else (gradients_buffer(self.block, self.gradient_buffer),)
                )
            case Kind.OFFLOAD:
                return (("gradient", self.block),)
            case Kind.UPDATE:
                return (("working", self.block), ("moments", self.block))
            case Kind.NORM:
                return (("norm", 0),)

    def __str__(self) -> str:
        """Render the operation as a line of a program."""
        parts = [f"{self.kind.value:<9} b{self.block}" if self.block >= 0 else self.kind.value]
        parts += [f"s{self.slot}"] if self.slot >= 0 else []
        parts += [f"g{self.gradient_buffer}"] if self.gradient_buffer >= 0 else []
        parts += ["adds"] if self.loads else []
        return " ".join(parts)


def weights_buffer(block: int, slot: int) -> Buffer:
    """Name the device buffer with a block's weights: its slot, or its own place if it is resident."""
    return ("slot", slot) if slot >= 0 else ("resident", block)


def gradients_buffer(block: int, gradient_buffer: int) -> Buffer:
    """Name the device buffer with a block's gradients: one of the ring, or its own if it is resident."""
    return ("gradient_buffer", gradient_buffer) if gradient_buffer >= 0 else ("resident_gradient", block)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSize:
    """What a schedule needs to know of a block."""

    is_streamed: bool
    is_trained: bool
    fetch_bytes: int
    """Bytes of the working weights."""
    offload_bytes: int
    """Bytes of a complete gradient."""
    accumulator_bytes: int
    """Bytes of a gradient that is still adding up."""


@dataclass(frozen=True, slots=True)
class Visit:
    """The model, or autograd, passes a streamed block."""

    block: int
    is_backward: bool = False
    loads: bool = False
    """Backward only: earlier rounds left a gradient to add to."""
    completes: bool = True
    """Backward only: after this visit the gradient is complete."""


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in launch order, and what the slots hold when they are done."""

    operations: tuple[Operation, ...]
    contents: tuple[int | None, ...]

    def __str__(self) -> str:
        """Render one operation per line."""
        return "\n".join(map(str, self.operations))

    def count(self, kind: Kind) -> int:
        """Count the operations of one kind."""
        return sum(operation.kind is kind for operation in self.operations)

    def nbytes(self, kind: Kind) -> int:
        """Add up the bytes that operations of one kind move."""
        return sum(operation.nbytes for operation in self.operations if operation.kind is kind)


def schedule(
    visits: Sequence[Visit],
    sizes: Sequence[BlockSize],
    contents: Sequence[int | None],
    *,
    num_gradient_buffers: int = 1,
    first_gradient_buffer: int = 0,
) -> Program:
    """Place fetches, loads and offloads around the visits of streamed blocks.

    Args:
        visits: What the model will do, in order.
        sizes: One per block, streamed or not.
        contents: What each slot holds at the start (None: nothing of use).
        num_gradient_buffers: Device buffers in which gradients add up, used in turn.
        first_gradient_buffer: The first one to use.
    """
    slots = list(contents)
    uses: dict[int, list[int]] = {}
    for position in range(len(visits) - 1, -1, -1):
        uses.setdefault(visits[position].block, []).append(position)
    never = len(visits)

    def next_use(block: int | None) -> int:
        return uses[block][-1] if block is not None and uses.get(block) else never

    operations: list[Operation] = []
    missing = 0
    ring = first_gradient_buffer
    for position, visit in enumerate(visits):
        missing = max(missing, position)
        while missing < len(visits):
            block = visits[missing].block
            if block in slots:
                missing += 1
                continue
            victim = max(range(len(slots)), key=lambda slot: next_use(slots[slot]))
            if next_use(slots[victim]) < missing:
                break
            slots[victim] = block
            operations.append(
                Operation(kind=Kind.FETCH, block=block, slot=victim, nbytes=sizes[block].fetch_bytes)
            )
        uses[visit.block].pop()
        slot = slots.index(visit.block)
        if not visit.is_backward:
            operations.append(Operation(kind=Kind.FORWARD, block=visit.block, slot=slot))
            continue
        size = sizes[visit.block]
        if not size.is_trained:
            operations.append(Operation(kind=Kind.BACKWARD, block=visit.block, slot=slot))
            continue
        operations += _backward(visit, size, slot, ring)
        ring = (ring + 1) % num_gradient_buffers
    return Program(tuple(operations), tuple(slots))


def _backward(visit: Visit, size: BlockSize, slot: int, ring: int) -> list[Operation]:
    common: dict[str, Any] = {
        "block": visit.block,
        "gradient_buffer": ring,
        "loads": visit.loads,
        "completes": visit.completes,
    }
    offload_bytes = size.offload_bytes if visit.completes else size.accumulator_bytes
    operations = [
        Operation(kind=Kind.BACKWARD, slot=slot, **common),
        Operation(kind=Kind.OFFLOAD, nbytes=offload_bytes, **common),
    ]
    if visit.loads:
        operations.insert(0, Operation(kind=Kind.LOAD, nbytes=size.accumulator_bytes, **common))
    return operations


def round_visits(
    order: Sequence[int], backward_order: Sequence[int], *, loads: bool = False, completes: bool = True
) -> list[Visit]:
    """List the visits of one round: forward through `order`, then back through `backward_order`."""
    forward = [Visit(block) for block in order]
    backward = [Visit(block, is_backward=True, loads=loads, completes=completes) for block in backward_order]
    return forward + backward


def fetch_residents(sizes: Sequence[BlockSize]) -> list[Operation]:
    """List the copies that bring every resident block's new weights to the device, once per step."""
    return [
        Operation(kind=Kind.FETCH, block=block, nbytes=size.fetch_bytes)
        for block, size in enumerate(sizes)
        if not size.is_streamed
    ]


def offload_residents(sizes: Sequence[BlockSize], blocks: Sequence[int]) -> list[Operation]:
    """List the copies that take the gradients of resident `blocks` home, once per step."""
    return [
        Operation(kind=Kind.OFFLOAD, block=block, loads=True, nbytes=sizes[block].offload_bytes)
        for block in blocks
    ]


def optimizer_program(blocks: Sequence[int]) -> list[Operation]:
    """List the end of a step: the norm, then the updates of `blocks` in forward order."""
    updates = [Operation(kind=Kind.UPDATE, block=block) for block in blocks]
    return [Operation(kind=Kind.NORM, blocks=tuple(blocks)), *updates]
