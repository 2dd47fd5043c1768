"""Resident layers: their whole state is on the device, and updated there; it comes home when it is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.features.ranks import spread
from megatrain.plan.program.features.roles import StateUpdate
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Prices, Task, Touched, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull(Operation):
    """Copy the whole state of a resident block to the device."""

    is_lent: bool = False
    """It takes back what `Push` has lent."""

    label, lane, rate = "pull", Lane.FETCH, "pull_s"

    def touches(self) -> Touched:
        """Say that it reads the state at home and writes it on the device."""
        return _lent(self.block) if self.is_lent else _at_home(self.block), _on_device(self.block)

    def work(self, parts: Parts) -> Work:
        """Return the copy."""
        return parts.states.pull(self.block)


@dataclass(frozen=True, kw_only=True, slots=True)
class Push(Operation):
    """Copy the state of a resident block home, or this rank's share of it."""

    is_share: bool = False
    """It copies a rank's share, and others bring theirs."""
    is_lent: bool = False
    """It copies to the place in RAM of a block that is on the device alone, of which no other lane knows."""

    label, lane, rate, changes = "push", Lane.OFFLOAD, "push_s", "copy_home"
    changes_home = True

    def touches(self) -> Touched:
        """Say that it reads the state on the device and writes it, or this rank's share, at home."""
        home = (("share", self.block),) if self.is_share else _at_home(self.block)
        return _on_device(self.block), _lent(self.block) if self.is_lent else home

    def work(self, parts: Parts) -> Work:
        """Return the copy."""
        return parts.states.push(self.block)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOnDevice(Operation):
    """Round the sum of a resident block's gradient to the working dtype where it is, and sum its squares."""

    label, lane = "round", Lane.OFFLOAD

    def touches(self) -> Touched:
        """Say that it reads the sum, and writes it and its squares."""
        gradient = ("resident_gradient", self.block)
        return (gradient,), (gradient, ("squares", self.block))

    def work(self, parts: Parts) -> Work:
        """Return the rounding."""
        return partial(parts.gradients.round_on_device, self.block)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOnDevice(StateUpdate):
    """Update a resident block, of several ranks this one's share of it."""

    label, on_device, changes_home = "update", True, False

    def touches(self) -> Touched:
        """Say that it reads the gradient, and the norm if that has to be known, and writes the state."""
        gradient = ("resident_gradient", self.block)
        reads = (gradient, ("norm", 0)) if self.follows_norm else (gradient,)
        return reads, _on_device(self.block)

    def seconds(self, prices: Prices) -> float:
        """Return the seconds of the update there."""
        return prices.device_update_s(self.block)

    def tasks(self, prices: Prices) -> tuple[Task, ...]:
        """Return one task: where the device runs it, it runs among the rest of compute."""
        return (self.task(Lane.COMPUTE if prices.updates_in_compute else self.lane, prices),)

    def settle(self, parts: Parts) -> None:
        """Note that the device's state is newer than what is home."""
        parts.states.settle_update(self.block)


def _at_home(block: int) -> tuple[Buffer, ...]:
    return ("working", block), ("moments", block)


def _on_device(block: int) -> tuple[Buffer, ...]:
    return ("resident", block), ("device_moments", block)


def _lent(block: int) -> tuple[Buffer, ...]:
    return (("lent", block),)


def rounded_residents(sizes: Sequence[BlockSize], blocks: Iterable[int]) -> list[Operation]:
    """List what completes the gradients of those of `blocks` that are updated on the device."""
    return [RoundOnDevice(block=block) for block in sorted(blocks) if sizes[block].updates_on_device]


def pull(block: int, nbytes: int, *, is_lent: bool = False) -> Operation:
    """Return the copy of a resident block's state to the device; `is_lent`: it has been lent from there."""
    return Pull(block=block, nbytes=nbytes, is_lent=is_lent)


def pushed(block: int, size: BlockSize, *, has_shares: bool) -> list[Operation]:
    """List what brings a block home that is newer on the device; `has_shares`: each rank brings its own."""
    push = Push(block=block, is_share=has_shares, nbytes=size.whole_bytes)
    return spread(push, 0, has_shares=has_shares)
