"""The lanes in which operations of a training step run."""

from __future__ import annotations

from enum import Enum


class Lane(str, Enum):
    """A queue in which operations run in order. Operations in different lanes run at the same time."""

    __hash__ = str.__hash__  # in C: plans look lanes up by the million

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
    """Weights that ranks have updated, on their way to the others."""
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
