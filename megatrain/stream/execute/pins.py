"""Recomputed fragments that keep their slots until their backward: saved tensors point into them."""

from __future__ import annotations

from typing import NamedTuple

from megatrain.plan.program.operations import Operation


class Pin(NamedTuple):
    """A recomputed fragment that waits for its backward."""

    block: int
    slot: int
    """-1 where the block is resident."""
    micro_batch: int
    owner: object
    """Stands for the call of the layer that the block is a fragment of."""


class Pins:
    """The fragments that wait, in the order in which they were recomputed."""

    def __init__(self) -> None:
        self._pins: list[Pin] = []

    @property
    def slots(self) -> set[int]:
        """The slots that must keep their content."""
        return {pin.slot for pin in self._pins} - {-1}

    def add(self, operation: Operation, owner: object) -> None:
        """Let a fragment keep its slot."""
        self._pins.append(Pin(operation.block, operation.slot, operation.micro_batch, owner))

    def release(self, operation: Operation) -> None:
        """Let a fragment go, if it was pinned: its backward begins."""
        for number in reversed(range(len(self._pins))):
            if self._pins[number].block == operation.block:
                assert self._pins.pop(number).slot == operation.slot, "a pinned fragment has moved"
                return

    def of_others(self, owner: object | None) -> list[Pin]:
        """List the fragments of other calls, the newest first."""
        return [pin for pin in reversed(self._pins) if pin.owner is not owner]

    def clear(self) -> None:
        """Let all go."""
        self._pins.clear()
