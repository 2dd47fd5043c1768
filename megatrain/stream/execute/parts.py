"""The parts of an engine that move its bytes: operations are handed them, and call their methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatrain.plan.program.features.roles import StateUpdate
from megatrain.plan.program.operations import Work
from megatrain.store.state import HostState
from megatrain.stream.execute.gradients import Gradients
from megatrain.stream.execute.guard import StateGuard
from megatrain.stream.execute.integrity import Integrity
from megatrain.stream.execute.resident_state import DeviceStates
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.execute.weights import Weights
from megatrain.stream.lanes import Lanes


class OptimizerWork(NamedTuple):
    """What the norm and the updates of a step run, made at the moment when they are issued."""

    update: Callable[[StateUpdate], Work]
    norm: Callable[[Sequence[int]], Work] | None = None
    """Is given the blocks whose gradients it is of. None: these updates wait for none."""


class ActivationCopies(Protocol):
    """What the executor needs of the activations that wait on the host; operations call more methods."""

    def sweep(self) -> None:
        """Drop what nobody will ask for: a backward is over."""

    def clear(self) -> None:
        """Drop everything, after an exception."""


class Counts:
    """What the engine has moved since attach."""

    def __init__(self) -> None:
        self.fetches = 0
        """Fetches of streamed blocks."""
        self.offloads = 0
        """Offloads of streamed blocks' gradients."""
        self.fetch_bytes = 0
        self.offload_bytes = 0
        self.update_bytes = 0
        """Host memory that updates have read and written."""
        self.drive_read_bytes = 0
        """State, weights and gradients from drives; `OffloadedActivations.drive_bytes` counts activations."""
        self.drive_write_bytes = 0
        """State and gradients to the drives, commits included."""
        self.gathered_bytes = 0
        """Of weights, got from the other ranks of the node."""
        self.exchanged_bytes = 0
        """Of sums, sent to other ranks."""
        self.spread_bytes = 0
        """Of new weights, sent to other nodes."""
        self.chunked_tokens = 0
        """Tokens that have passed the head in chunks."""
        self.rerun_tokens = 0
        """Those of them that pass it again in the backward."""
        self.swapped_bytes = 0
        """Given to the ranks that share out the same rows, and as many got from them."""

    def add(self, moves: str, nbytes: int) -> None:
        """Take note of what an operation moves, by `Operation.moves`."""
        setattr(self, moves, getattr(self, moves) + nbytes)


@dataclass
class EngineParts:
    """What an executor moves bytes with, among it what operations ask for (`Parts`)."""

    lanes: Lanes
    host: HostState
    slots: Slots
    """The places of blocks on the device."""
    weights: Weights
    gradients: Gradients
    states: DeviceStates
    activations: ActivationCopies
    counts: Counts
    integrity: Integrity
    guard: StateGuard
    drives: StateOnDrives
    optimizer: OptimizerWork | None = None
    """Set by an optimizer that updates a block as soon as its gradient is complete, and while a step ends."""
