"""The calls of a step's round: one for each micro-batch, in lockstep where there are several.

They pass every layer together, and come to the head one after the other, in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatrain.errors import ConfigError
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.growing_frequencies import GrowingFrequencies
from megatrain.stream.forward.head_backward import Cut, HeadBackward
from megatrain.stream.forward.lockstep import Keeper, Lockstep

T = TypeVar("T")


@dataclass(slots=True)
class Turn:
    """A call of a step's round: its place in the round, and how often it has passed the model."""

    place: int
    is_before: bool
    """It has no gradients: it comes before the losses of the round, or there are none."""
    has_passed: bool = False
    """A pass has begun."""
    num_passes: int = 0
    """Of those with gradients."""
    has_plain_loss: bool = False
    """It returns the loss of its one pass as the model has computed it."""
    cuts: list[Cut] = field(default_factory=list)
    """Where the heads of these begin."""

    def require_gradients(self) -> None:
        """Refuse a pass with gradients in a call that has none.

        Raises:
            ConfigError: The call has none.
        """
        if self.is_before:
            raise ConfigError(
                "a pass without gradients has enabled them; give what has gradients to engine.run_losses"
            )

    def number(self, num_together: int) -> int:
        """Return what names the coming pass; among others, one without gradients has no other's name."""
        self.has_passed = True
        if self.is_before:
            return self.place
        if not torch.is_grad_enabled():
            return -1 - self.place
        self.num_passes += 1
        return self.place + (self.num_passes - 1) * num_together


class Turns:
    """Whose turn it is, and in which order calls go on."""

    def __init__(self, keeper: Keeper, arrangement: Arrangement, model: nn.Module) -> None:
        """Begin with nobody's; `keeper` puts away and back what belongs to a micro-batch of the model."""
        self.frequencies = GrowingFrequencies(model)
        self._arrangement = arrangement
        self._num_layers = len(arrangement.layers)
        self._head_backward = HeadBackward()
        self.lockstep = Lockstep(keeper, arrangement.lanes.device, self._num_layers)
        self.current: Turn | None = None
        """The call of a step that is running; None: somebody else has called the model."""

    def run(self, turns: Sequence[Callable[[], T]], *, heads_in_turn: bool = True) -> list[T]:
        """Let calls go on together, each within a `turn`, and return what comes of each.

        Raises:
            ModelError: Rows of these calls, one after the other, would have other rotary frequencies.
        """
        found = self.lockstep.run(self.frequencies.numbered(turns), heads_in_turn=heads_in_turn)
        self.frequencies.check()
        return found

    @contextmanager
    def turn(
        self, place: int, seed: int | None, *, with_gradients: bool, has_plain_loss: bool = False
    ) -> Iterator[Turn]:
        """Run a call of a step's round within this context.

        Args:
            place: The place of the call in the round.
            seed: The seed of torch's generators; None: they go on.
            with_gradients: A claim that the call returns a loss; calls without gradients come before those of
                a round.
            has_plain_loss: A claim that it is the loss of one pass as the model has computed it.
        """
        if seed is not None:
            torch.manual_seed(seed)
        self.current = turn = Turn(place, is_before=not with_gradients, has_plain_loss=has_plain_loss)
        try:
            with torch.set_grad_enabled(with_gradients):
                yield turn
        finally:
            self.current = None

    def go_back(self, turn: Turn, loss: Tensor) -> Tensor:
        """Run the backward of a call's head, if that can run by itself; return where the rest begins."""
        rounds, executor = self._arrangement.rounds, self._arrangement.executor
        if not executor.spec.heads_in_turn:
            return loss
        self.lockstep.wait_for_earlier()
        with rounds.in_head():
            later = rounds.num_together - 1 - turn.place
            root = self._head_backward.begin(loss, turn.cuts, turn.place, later)
        executor.end_head()
        return root

    @property
    def is_head_followed(self) -> bool:
        """Whether the backward of the running call's head comes before another's forward of it."""
        in_turn = self._arrangement.executor.spec.heads_in_turn
        return self.has_plain_loss or (
            self.current is not None and in_turn and not self._head_backward.is_put_off
        )

    @property
    def has_plain_loss(self) -> bool:
        """Whether the running call returns the loss of its pass as it is, and heads have their backward."""
        in_turn = self._arrangement.executor.spec.heads_in_turn
        return self.current is not None and self.current.has_plain_loss and in_turn

    def give_way_to_pass(self) -> None:
        """Let the others begin their next pass in the order of the first: they have come from the head."""
        if self.current is not None and self.current.has_passed:
            self.lockstep.give_way(-1)

    def give_way_to_head(self) -> None:
        """Let the others pass the last layer: all have the head's weights together, one after the other."""
        if self.current is not None or self._arrangement.choice.outer_streams:
            self.lockstep.give_way(self._num_layers)
