"""The roles that kinds of operations share, and for which passes over a program and the engine ask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megatrain.plan.program.buffers import Buffer, weights_buffer
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Prices, Touched, Work
from megatrain.plan.program.visits import Visit


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPass(Operation):
    """A micro-batch passes a block, forward or backward."""

    visit: Visit
    slot: int = -1
    """Slot of a streamed block; -1: it is resident."""
    arrival: int = -1
    """One of two places on the device, where activations that it uses have come back; -1: there are none."""
    gradient_buffer: int = -1
    """The buffer of the ring where a backward's gradients add up; -1: the block's own, or there are none."""

    lane = Lane.COMPUTE
    is_compute = is_visit = True

    @property
    def micro_batch(self) -> int:
        """Return the number of the micro-batch within the round."""
        return self.visit.micro_batch

    @property
    def is_single(self) -> bool:
        """Return whether this backward makes the block's whole gradient, in the working dtype."""
        visit = self.visit
        return visit.sums_on_host or (visit.completes and visit.is_last and not visit.adds_up)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Return the block's weights, and activations that have come back."""
        weights = weights_buffer(self.block, self.slot)
        return (weights, ("arriving", self.arrival)) if self.arrival >= 0 else (weights,)

    def touches(self) -> Touched:
        """Say that it reads the weights; what it writes is the kind's own."""
        return self.reads, self.writes

    def seconds(self, prices: Prices) -> float:
        """Return the seconds of all micro-batches that pass together."""
        visit = self.visit
        one_s = prices.visit_s(self.block, is_backward=visit.is_backward, is_head=visit.is_head)
        return one_s * visit.num_micro_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientEnd(Operation):
    """A part of what follows a block's last backward of a round."""

    completes: bool = True
    """The gradient is complete after this round; otherwise it stays in fp32 for a later one."""

    ends_gradient = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SumTaken(GradientEnd):
    """A sum leaves the gradient buffer where it has added up."""

    gradient_buffer: int = -1
    """One of the ring; -1: the block's own, which is resident."""
    adds: bool = False
    """It is a sum in fp32: of several micro-batches, rounds, parts or ranks."""
    staging: int = -1
    """Host buffer through which it passes on its way; -1: it goes to the gradient plane, or stays."""

    lane = Lane.OFFLOAD
    takes_sum = True

    @property
    def is_single(self) -> bool:
        """Return whether one backward has made all of it, so that it is in the working dtype already."""
        return self.completes and not self.adds


@dataclass(frozen=True, kw_only=True, slots=True)
class StateUpdate(Operation):
    """The optimizer changes a block's state."""

    follows_norm: bool = True
    """Clipping or skipping needs the norm first."""
    staging: int = -1
    """Host buffer through which a gradient has come; -1: the gradient plane."""
    drive_staging: int = -1
    """Host buffer through which state on drives passes; -1: the state is in RAM."""

    lane, moves, is_update, changes = Lane.HOST, "update_bytes", True, "change"
    changes_home = True
    on_device: ClassVar[bool] = False
    """The state is on the device, and changes there."""

    def through(self, buffer: int, nbytes: int | None = None) -> Operation:
        """Return the same of state on drives."""
        return replace(self, drive_staging=buffer)

    def work(self, parts: Parts) -> Work:
        """Return the update."""
        return parts.optimizer.update(self)
