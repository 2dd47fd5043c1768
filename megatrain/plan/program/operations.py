"""The operations of a training step: what each does, on which block, and which buffers it reads and writes.

`plan.program.step` makes the list of a step. Everything else consumes that list: the engine executes it and
asserts that the model's visits match it, the ordering checker proves it, the planner times it, the trace
prints it. Waits are not in the list: they follow from the buffers that the operations read and write.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatrain.plan.program.buffers import (
    Buffer,
    gradients_buffer,
    home_buffer,
    waiting_buffer,
    weights_buffer,
)


class Lane(str, Enum):
    """A queue in which operations run in order. Operations in different lanes run at the same time."""

    __hash__ = str.__hash__  # in C: plans look lanes and kinds up by the million

    CALLER = "caller"
    """The launching thread itself, where it reads or writes host memory between operations."""
    COMPUTE = "compute"
    FETCH = "fetch"
    OFFLOAD = "offload"
    GATHER = "gather"
    """Weights between ranks."""
    EXCHANGE = "exchange"
    """Gradients between ranks."""
    SPREAD = "spread"
    """What ranks have updated."""
    SAVE = "save"
    """Copies of saved activations to the host."""
    RESTORE = "restore"
    """Copies of saved activations back to the device."""
    HOST = "host"
    READ = "nvme_read"
    """State on drives, on its way to an update."""
    PAGE = "nvme_page"
    """Weights on drives, on their way to the device."""
    WRITE = "nvme_write"
    """State on its way back to the drives, and its commits."""
    STOW = "nvme_stow"
    """Saved activations and gradients on their way to the drives. Not `WRITE`: a forward would wait there for
    the updates of the step before."""
    RECALL = "nvme_recall"
    """These on their way back."""


class Kind(str, Enum):
    """What an operation does."""

    __hash__ = str.__hash__

    FETCH = "fetch"
    """Copy a block's working weights to the device."""
    GATHER = "gather"
    """Make them whole on every rank, of which each has fetched a piece."""
    FORWARD = "forward"
    """The model passes through a block; also where a recomputation passes it again."""
    BACKWARD = "backward"
    """Autograd passes through a block, with its recomputation if it has one; gradients add up in a buffer."""
    HEAD = "head"
    """The final norm, the head and the loss of a micro-batch."""
    HEAD_BACKWARD = "head backward"
    """Autograd passes these, with what a head in chunks computes again."""
    LOAD = "load"
    """Copy what earlier rounds added up to the device, to go on adding."""
    OFFLOAD = "offload"
    """Copy gradients to the host, and sum their squares on the way if they are complete."""
    HOLD = "hold"
    """Put gradients into device memory of the block's own, where complete ones wait for the norm, and sum
    their squares."""
    SAVE = "save"
    """Copy a visit's saved activations to the host."""
    RESTORE = "restore"
    """Copy them back, one visit before they are needed."""
    STOW = "stow"
    """Write what a SAVE has copied to the host on to the drives."""
    RECALL = "recall"
    """Read it back, ahead of its RESTORE."""
    PARK = "park"
    """Write a complete gradient that an OFFLOAD has copied to the host on to the drives, to wait there for
    the norm."""
    UNPARK = "unpark"
    """Read it back, ahead of its update."""
    EXCHANGE = "exchange"
    """Send each rank its share of a complete sum, and add up what all ranks have sent of one's own."""
    SPREAD = "spread"
    """Wait until every rank has updated its share of a block, and bring the shares of one node to the others:
    then its weights are new."""
    ADD = "add"
    """Add a gradient that has come home by itself to the block's sum there; the last one is rounded to the
    working dtype, and the squares are summed."""
    ROUND = "round"
    """Round a complete sum to the working dtype where it is, and sum its squares."""
    NORM = "norm"
    """Turn the sums of squares into one scale for the step, or decide to skip it."""
    UPDATE = "update"
    """AdamW on a block's state."""
    SYNC = "sync"
    """The launching thread waits until all updates are done."""
    RELEASE = "release"
    """Give the memory of the gradient plane back until it is written again."""
    PULL = "pull"
    """Copy the whole state of a resident block to the device."""
    PUSH = "push"
    """Copy it home."""
    READ = "read"
    """Read a block's state from the drives, ahead of its update; several ranks read a part each."""
    PAGE = "page"
    """Read a block's weights from the drives, ahead of its fetch."""
    WRITE = "write"
    """Write a block's state back to the drives, or, before a commit, what lives in RAM; as READ."""
    SPILL = "spill"
    """Copy a piece of a block's state in RAM to where WRITE takes it from."""
    SEAL = "seal"
    """Take down what a commit says of the run, once all updates are done, and all ranks' SPILLs."""
    COMMIT = "commit"
    """Make what was written last what a crash leaves. The first of several ranks does it."""


_STATE = ("working", "moments", "gradient", "drive")
"""What of a block the host has."""

_LANES = {
    Kind.FETCH: Lane.FETCH,
    Kind.GATHER: Lane.GATHER,
    Kind.LOAD: Lane.FETCH,
    Kind.FORWARD: Lane.COMPUTE,
    Kind.BACKWARD: Lane.COMPUTE,
    Kind.HEAD: Lane.COMPUTE,
    Kind.HEAD_BACKWARD: Lane.COMPUTE,
    Kind.OFFLOAD: Lane.OFFLOAD,
    Kind.HOLD: Lane.OFFLOAD,
    Kind.SAVE: Lane.SAVE,
    Kind.RESTORE: Lane.RESTORE,
    Kind.STOW: Lane.STOW,
    Kind.RECALL: Lane.RECALL,
    Kind.PARK: Lane.STOW,
    Kind.UNPARK: Lane.RECALL,
    Kind.EXCHANGE: Lane.EXCHANGE,
    Kind.SPREAD: Lane.SPREAD,
    Kind.ADD: Lane.HOST,
    Kind.ROUND: Lane.HOST,
    Kind.NORM: Lane.HOST,
    Kind.UPDATE: Lane.HOST,
    Kind.SYNC: Lane.CALLER,
    Kind.RELEASE: Lane.HOST,
    Kind.PULL: Lane.FETCH,
    Kind.PUSH: Lane.OFFLOAD,
    Kind.READ: Lane.READ,
    Kind.PAGE: Lane.PAGE,
    Kind.WRITE: Lane.WRITE,
    Kind.SPILL: Lane.HOST,
    Kind.SEAL: Lane.HOST,
    Kind.COMMIT: Lane.WRITE,
}


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
    """UPDATE and ROUND: of a resident block whose state is on the device."""
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
    num_sums: int = 1
    """LOAD and OFFLOAD of what adds up over rounds: how many partial sums that is; see `Runs`."""
    is_share: bool = False
    """Of a rank's share of the block, among several ranks: an EXCHANGE has made the sum, a SPREAD follows.
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
        return Lane.OFFLOAD if self.kind is Kind.ROUND and self.on_device else _LANES[self.kind]

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
                return (("share", self.block),)
            case Kind.UPDATE:
                norm: tuple[Buffer, ...] = (("norm", 0),) if self.follows_norm else ()
                if self.on_device:
                    return (("resident_gradient", self.block), *norm)
                through = self._through if self.is_share else ()  # others write their shares of it
                return (home_buffer(self.block, self.staging), *norm, *through)
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
            case Kind.SPREAD | Kind.PUSH:
                return (("working", self.block), ("moments", self.block), *self._through)
            case Kind.UPDATE if self.is_share:
                return (("share", self.block),)
            case Kind.UPDATE:
                if self.on_device:
                    return (("resident", self.block), ("device_moments", self.block))
                return (("working", self.block), ("moments", self.block), *self._through)
            case Kind.ROUND:
                sums = "resident_gradient" if self.on_device else "gradient"
                return ((sums, self.block), ("squares", self.block))
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
