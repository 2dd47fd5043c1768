"""What ranks write into the store where they meet, by key, and what it tells of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from megatrain.distributed.processes import machine, status_of

if TYPE_CHECKING:
    from torch.distributed import Store

Beat = dict[str, Any]
"""What a rank says of itself all the time."""

JOINED, ALL = "megatrain/joined", "megatrain/all"
LOST = "megatrain/lost"
DONE = "megatrain/done"
GIVEN_UP = "megatrain/given_up"
"""The number of the newest step that a rank has given up, for which its device has no room."""
AGAIN = "The same command goes on from the newest checkpoint"
"""The way out of every loss."""


def beat_of(rank: int) -> str:
    """Return the key of what a rank says all the time."""
    return f"megatrain/beat/{rank}"


def ended(rank: int) -> str:
    """Return the key of the error that a rank has ended with."""
    return f"megatrain/ended/{rank}"


def left(rank: int) -> str:
    """Return the key that is there once a rank has done its part."""
    return DONE if rank == 0 else f"megatrain/left/{rank}"


def name_of(rank: int, beat: Beat) -> str:
    """Name a rank in a sentence."""
    return f"rank {rank} (process {beat['process']} on {beat['host']})"


def place_of(store: Store) -> str:
    """Say in brackets where a store is; nothing, if it has no place in a network."""
    found: Any = store
    while hasattr(found, "underlying_store"):
        found = found.underlying_store
    return f" ({found.host}:{found.port})" if hasattr(found, "port") else ""


def processes_seen() -> str:
    """Say whose numbers of processes are those that this process sees: of which machine and container."""
    return f"{machine()} {os.readlink('/proc/self/ns/pid')}"


def is_gone(beat: Beat) -> bool:
    """Whether a process has ended, as far as can be seen from here."""
    if beat["processes"] != processes_seen():
        return False
    status = status_of(beat["process"])
    return status is None or status[0] in "ZX"
