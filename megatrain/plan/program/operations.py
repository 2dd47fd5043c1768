"""The operations of a training step: what each does, on which block, and which buffers it reads and writes.

`plan.program.step` makes the list of a step. Everything else consumes that list: the engine executes it and
asserts that the model's visits match it, the ordering checker proves it, the planner times it, the trace
prints it. Waits are not in the list: they follow from the buffers that the operations read and write.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.plan.program.buffers import (
    Buffer,
    gradients_buffer,
    home_buffer,
    waiting_buffer,
    weights_buffer,
)
from megatrain.plan.program.kinds import LANES, Kind, Lane

_STATE = ("working", "moments", "gradient", "drive")
"""What of a block the host has."""

_ON_DEVICE = {Kind.ROUND: Lane.OFFLOAD, Kind.SPREAD: Lane.GATHER}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation: what, on which block, through which slot and gradient buffer.

    A block is what streams as one: a decoder layer, one of its fragments, or a resident part of the model.
    """

    kind: Kind
    block: int = -1
    slot: int = -1
    """Slot of a streamed block; -1 where none is involved."""
    gradient_buffer: int = -1
    staging: int = -1
    """Host buffer through which a gradient passes on its way to its update; -1: the gradient plane."""
    waiting: int = -1
    """Device place in which a streamed block's gradient waits, which is the block's own; -1: it is elsewhere,
    and that of a resident block where it adds up."""
    is_held: bool = False
    """OFFLOAD only: a HOLD has completed the gradient and summed its squares."""
    on_device: bool = False
    """UPDATE, ROUND and SPREAD: of a resident block whose state is on the device."""
    drive_staging: int = -1
    """Host buffer through which state on drives passes; -1: the state is in RAM."""
    page: int = -1
    """Host buffer through which weights on drives pass; -1: they are in RAM."""
    saved: int = -1
    """Of what FORWARD leaves for the host, and of its copies: a number of its own in the program."""
    arrival: int = -1
    """Of what RESTORE brings, and BACKWARD or a second FORWARD uses: one of two places on the device."""
    piece: int = -1
    """SPILL and its WRITE: which piece of the block's image on the drives."""
    activation_staging: int = -1
    """Host buffer through which saved activations on drives pass; -1: they wait in RAM."""
    micro_batch: int = 0
    """Number within the round."""
    num_micro_batches: int = 1
    """How many micro-batches pass in this operation: more than one where a plan times them together."""
    collects: bool = True
    """BACKWARD only: gradients add up, in a buffer of the ring or in the resident block's own."""
    adds: bool = False
    """The gradient adds to that of the round's micro-batches before."""
    is_head: bool = False
    """Of a head that streams: FORWARD and BACKWARD are also what HEAD and HEAD_BACKWARD are of others, and
    the gradient comes in parts, one for each chunk of tokens, that add up in fp32."""
    loads: bool = False
    """The gradient adds to what earlier rounds of the step left."""
    is_last: bool = True
    """No later micro-batch of the round adds to the gradient."""
    completes: bool = True
    """The gradient is complete after this round; otherwise it stays in fp32 for a later one."""
    sums_on_host: bool = False
    """BACKWARD and OFFLOAD: of one micro-batch of a later round, whose gradient leaves by itself."""
    sums: range = range(1)
    """LOAD and OFFLOAD of what adds up over rounds: which partial sums, by their places in the stack; see
    `Runs`. EXCHANGE: those that join what it makes, which takes the place of the first."""
    is_share: bool = False
    """Of a rank's share of the block, among several ranks: an EXCHANGE makes the sum, a SPREAD follows.
    FETCH: of a rank's piece of the weights; a GATHER follows."""
    follows_norm: bool = True
    """UPDATE only: clipping or skipping needs the norm first."""
    nbytes: int = 0
    """Bytes that cross the link; of work on the host, bytes of its memory that are read and written."""
    blocks: tuple[int, ...] = ()
    """NORM: the blocks whose gradients it is of. RELEASE: those of the plane. SYNC: all. COMMIT: those on
    the drives. HEAD and HEAD_BACKWARD: those outside all layers."""

    @property
    def is_single(self) -> bool:
        """Whether one backward makes the whole gradient, which is then in the working dtype already."""
        whole = self.completes and self.is_last and not self.loads and not self.adds and not self.is_head
        return (whole and not self.is_share) or self.sums_on_host

    @property
    def lane(self) -> Lane:
        """The lane in which the operation runs."""
        return (_ON_DEVICE if self.on_device else LANES).get(self.kind, Lane.HOST)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Buffers that the operation reads."""
        match self.kind:  # what there is most of first
            case Kind.FORWARD | Kind.BACKWARD | Kind.GATHER:
                arrived: tuple[Buffer, ...] = (("arriving", self.arrival),) if self.arrival >= 0 else ()
                return (weights_buffer(self.block, self.slot), *arrived)
            case Kind.FETCH:
                return (("page", self.page) if self.page >= 0 else ("working", self.block),)
            case Kind.READ | Kind.PAGE:
                return (("drive", self.block),)
            case Kind.WRITE:
                return (("drive_staging", self.drive_staging),)
            case Kind.SPILL | Kind.PULL:
                return (("working", self.block), ("moments", self.block))
            case Kind.PUSH:
                return (("resident", self.block), ("device_moments", self.block))
            case Kind.COMMIT:
                return (("meta", 0), *((image, n) for image in ("drive", "spilled") for n in self.blocks))
            case Kind.LOAD if self.waiting >= 0:
                return (("waiting", self.waiting),)
            case Kind.LOAD | Kind.PARK | Kind.ADD:
                return (home_buffer(self.block, self.staging),)
            case Kind.UNPARK:
                return (("parked", self.block),)
            case Kind.HEAD | Kind.HEAD_BACKWARD:
                return tuple(("resident", block) for block in self.blocks)
            case Kind.OFFLOAD if self.is_held:
                return (waiting_buffer(self.block, self.waiting),)
            case Kind.OFFLOAD | Kind.HOLD | Kind.EXCHANGE:
                return (gradients_buffer(self.block, self.gradient_buffer),)
            case Kind.SPREAD:
                return (("resident" if self.on_device else "share", self.block),)
            case Kind.UPDATE:
                norm: tuple[Buffer, ...] = (("norm", 0),) if self.follows_norm else ()
                through = self._through if self.is_share else ()  # others write their shares of it
                home = home_buffer(self.block, self.staging)
                return (("resident_gradient", self.block) if self.on_device else home, *norm, *through)
            case Kind.ROUND if self.staging >= 0:
                return (home_buffer(self.block, self.staging),)
            case Kind.ROUND:
                return (("resident_gradient" if self.on_device else "gradient", self.block),)
            case Kind.NORM:
                return tuple(("squares", block) for block in self.blocks)
            case Kind.SAVE:
                return (("leaving", self.saved % 2),)
            case Kind.RESTORE | Kind.STOW:
                return (self._activations,)
            case Kind.RECALL:
                return (("scratch", self.saved),)
            case Kind.SYNC:
                return tuple((kind, block) for kind in _STATE for block in self.blocks)
            case Kind.RELEASE | Kind.SEAL:
                return ()

    @property
    def _activations(self) -> Buffer:
        """Name the host buffer with what a visit has saved."""
        if self.activation_staging >= 0:
            return ("activation_staging", self.activation_staging)
        return ("activations", self.saved)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Buffers that the operation writes."""
        match self.kind:
            case Kind.FETCH | Kind.GATHER:
                return (weights_buffer(self.block, self.slot),)
            case Kind.LOAD:
                return (gradients_buffer(self.block, self.gradient_buffer),)
            case Kind.FORWARD:  # what a visit saves leaves one visit later: two at a time are on the device
                return (("leaving", self.saved % 2),) if self.saved >= 0 else ()
            case Kind.SAVE | Kind.RECALL:
                return (self._activations,)
            case Kind.RESTORE:
                return (("arriving", self.arrival),)
            case Kind.STOW:
                return (("scratch", self.saved),)
            case Kind.BACKWARD:
                return (gradients_buffer(self.block, self.gradient_buffer),) if self.collects else ()
            case Kind.OFFLOAD:
                is_new = self.completes and not self.is_held and not self.sums_on_host
                return (home_buffer(self.block, self.staging), *self._squares(is_new))
            case Kind.ADD:
                return (("gradient", self.block), *self._squares(self.completes))
            case Kind.HOLD:
                return (waiting_buffer(self.block, self.waiting), ("squares", self.block))
            case Kind.PARK:
                return (("parked", self.block),)
            case Kind.UNPARK:
                return (home_buffer(self.block, self.staging),)
            case Kind.EXCHANGE:
                return (gradients_buffer(self.block, self.gradient_buffer), ("exchange", 0))
            case Kind.SPREAD if self.on_device:
                return (("resident", self.block),)
            case Kind.UPDATE if self.on_device:
                return (("resident", self.block), ("device_moments", self.block))
            case Kind.UPDATE | Kind.PUSH if self.is_share:
                return (("share", self.block),)
            case Kind.UPDATE | Kind.PUSH | Kind.SPREAD:
                return (("working", self.block), ("moments", self.block), *self._through)
            case Kind.ROUND:
                sums = "resident_gradient" if self.on_device else "gradient"
                through = (home_buffer(self.block, self.staging),) if self.staging >= 0 else ()
                return ((sums, self.block), ("squares", self.block), *through)
            case Kind.RELEASE:
                return tuple(("gradient", block) for block in self.blocks)
            case Kind.PULL:
                return (("resident", self.block), ("device_moments", self.block))
            case Kind.SEAL:
                return (("meta", 0),)
            case Kind.READ | Kind.SPILL:
                return (("drive_staging", self.drive_staging),)
            case Kind.PAGE:
                return (("page", self.page),)
            case Kind.WRITE:  # what is spilled is not read before another run goes on from it
                return (("spilled" if self.piece >= 0 else "drive", self.block),)
            case Kind.COMMIT | Kind.HEAD | Kind.HEAD_BACKWARD | Kind.SYNC:
                return ()
            case Kind.NORM:
                return (("norm", 0),)

    @property
    def _through(self) -> tuple[Buffer, ...]:
        """Name the host buffer through which state on drives passes to its update, if it does."""
        return (("drive_staging", self.drive_staging),) if self.drive_staging >= 0 else ()

    def _squares(self, is_known: bool) -> tuple[Buffer, ...]:
        return (("squares", self.block),) if is_known else ()

    def __str__(self) -> str:
        """Render the operation as a line of a program."""
        parts = [f"{self.kind.value:<9} b{self.block}" if self.block >= 0 else self.kind.value]
        parts += [f"m{self.micro_batch}"] if self.micro_batch > 0 else []
        parts += [f"s{self.slot}"] if self.slot >= 0 else []
        parts += [f"g{self.gradient_buffer}"] if self.gradient_buffer >= 0 else []
        parts += [f"d{self.drive_staging}"] if self.drive_staging >= 0 else []
        parts += [f"p{self.page}"] if self.page >= 0 else []
        parts += ["adds"] if self.loads or self.adds else []
        return " ".join(parts)


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
