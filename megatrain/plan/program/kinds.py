"""What operations of a training step there are, and the lane in which each runs."""

from __future__ import annotations

from enum import Enum


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
    the norm, or a sum, which waits for the next round."""
    UNPARK = "unpark"
    """Read it back, ahead of its update, or of its LOAD."""
    EXCHANGE = "exchange"
    """Send each rank its share of a complete sum, and add up what all ranks have sent of one's own."""
    SPREAD = "spread"
    """Wait until every rank has updated its share of a block, and bring the shares of one node to the others,
    or, of a resident block, those of each rank to all: then its weights are new."""
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


LANES = {
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
