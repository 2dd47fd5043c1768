"""The end of a step on the host: the norm of its gradients, and the update of each block's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.buffers import home_buffer
from megatrain.plan.program.features.ranks import spread
from megatrain.plan.program.features.resident import UpdateOnDevice
from megatrain.plan.program.features.roles import GradientEnd, StateUpdate
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Prices, Task, Touched, Work

_STATE = ("working", "moments", "gradient", "drive")
"""The buffers of a block's state on the host and the drives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm(Operation):
    """Turn the sums of squares into one scale for the step, or decide to skip it."""

    blocks: tuple[int, ...]
    """The blocks whose gradients are normed."""

    label, lane = "norm", Lane.HOST

    def touches(self) -> Touched:
        """Say that it reads the squares and writes the norm."""
        return tuple([("squares", block) for block in self.blocks]), (("norm", 0),)

    def work(self, parts: Parts) -> Work:
        """Return the sum of squares."""
        return parts.optimizer.norm(self.blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(StateUpdate):
    """Update a block's state on the host."""

    is_share: bool = False
    """It updates a rank's share, and a spread follows."""

    label, rate, ends_gradient = "update", "update_s", True

    def touches(self) -> Touched:
        """Say that it reads the gradient, the norm if that has to be known, and writes the state or a share.

        Others write their shares of a buffer through which it passes.
        """
        reads = [home_buffer(self.block, self.staging), *((("norm", 0),) if self.follows_norm else ())]
        through = (("drive_staging", self.drive_staging),) if self.drive_staging >= 0 else ()
        if self.is_share:
            return (*reads, *through), (("share", self.block),)
        return (*reads,), (("working", self.block), ("moments", self.block), *through)

    def settle(self, parts: Parts) -> None:
        """Note that a gradient is used up, and that what is in RAM of the block differs from its image."""
        if not self.follows_norm:
            parts.gradients.settle_used(self.block, self.staging)
        parts.drives.settle_update(self.block)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync(Operation):
    """The launching thread waits until all updates are done."""

    blocks: tuple[int, ...]

    label, lane = "sync", Lane.CALLER

    def touches(self) -> Touched:
        """Say that it reads all that the host has of the blocks."""
        return tuple([(kind, block) for kind in _STATE for block in self.blocks]), ()

    def tasks(self, prices: Prices) -> tuple[Task, ...]:
        """Return it as one of compute: a thread that waits launches nothing."""
        return (self.task(Lane.COMPUTE, prices),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Operation):
    """Give the memory of the gradient plane back until it is written again."""

    blocks: tuple[int, ...]
    """The blocks of the plane."""

    label, lane = "release", Lane.HOST

    def touches(self) -> Touched:
        """Say that it writes the plane."""
        return (), tuple(("gradient", block) for block in self.blocks)

    def work(self, parts: Parts) -> Work:
        """Return what gives it back."""
        return parts.gradients.release_plane


def update_of(
    block: int, size: BlockSize, *, staging: int = -1, follows_norm: bool = True, has_shares: bool = False
) -> list[Operation]:
    """List the update of a block, and, of a rank's share, what brings those of the other ranks.

    Args:
        block: The block's number.
        size: The block's size.
        staging: The host buffer through which the gradient comes; -1: the gradient plane.
        follows_norm: Whether clipping or skipping needs the norm first.
        has_shares: Whether several ranks update a share each.
    """
    if size.updates_on_device:
        there = UpdateOnDevice(block=block, staging=staging, follows_norm=follows_norm)
        return spread(there, size.spread_bytes, has_shares=has_shares, on_device=True)
    update = Update(
        block=block,
        staging=staging,
        follows_norm=follows_norm,
        is_share=has_shares,
        nbytes=size.update_bytes,
    )
    return spread(update, size.spread_bytes, has_shares=has_shares)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """The way of complete gradients to updates that follow them at once, and use them up."""

    num_staging: int = 0
    """The number of host buffers through which these gradients pass in turn; 0: the plane."""
    first_staging: int = 0
    """The first of them to use."""

    def staging(self, number: int) -> int:
        """Return the buffer of a gradient, by its number; -1: the plane."""
        return (self.first_staging + number) % self.num_staging if self.num_staging else -1


def updated_at_once(
    operations: Sequence[Operation],
    sizes: Sequence[BlockSize],
    at_home: Callable[[int, bool], bool],
    at_once: AtOnce,
    *,
    has_shares: bool = False,
) -> list[Operation]:
    """List operations in which every gradient that is complete at home is followed by its update.

    Args:
        operations: The program.
        sizes: The blocks' sizes.
        at_home: A function that returns whether a block's gradient waits on the host, complete or not.
        at_once: The way of these gradients to their updates.
        has_shares: Whether several ranks update a share each.
    """
    result: list[Operation] = []
    turn = 0
    for operation in operations:
        ends = isinstance(operation, GradientEnd) and operation.completes
        if not ends or not at_home(operation.block, True):
            result.append(operation)
            continue
        staging = -1
        if operation.takes_sum and at_once.num_staging:
            staging, turn = at_once.staging(turn), turn + 1
            operation = operation.through(staging)
        result.append(operation)
        block, shared = operation.block, {"has_shares": has_shares}
        result += update_of(block, sizes[block], staging=staging, follows_norm=False, **shared)
    return result
