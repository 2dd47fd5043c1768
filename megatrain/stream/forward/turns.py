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
    cuts: list[Cut] = field(default_factory=list)
    """Where the heads of these begin."""

    def require_gradients(self) -> None:
        """Refuse a pass with gradients in a call that has none.

        Raises:
            ConfigError: It is one.
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

    def run(self, turns: Sequence[Callable[[], T]], *, heads_in_turn: bool) -> list[T]:
        """Let calls of `take` or `take_loss` go on together, and return what comes of each.

        Raises:
            ModelError: Rows of these calls, one after the other, would have other rotary frequencies.
        """
        if len(turns) == 1:
            return [turns[0]()]
        found = self.lockstep.run(self.frequencies.numbered(turns), heads_in_turn=heads_in_turn)
        self.frequencies.check()
        return found

    def take(self, place: int, call: Callable[[], T], seed: int | None) -> T:
        """Run the `place`-th call of a step's round, without gradients, before its losses.

        Args:
            place: Number within the round.
            call: Runs the model on a micro-batch.
            seed: The seed of torch's generators; None: they go on.
        """
        with self._turn(place, seed, with_gradients=False):
            return call()

    def take_loss(self, place: int, call: Callable[[], Tensor], seed: int | None) -> tuple[Tensor, Tensor]:
        """Run the `place`-th call of a step's round, and the backward of its head, if that can run by itself.

        Args:
            place: Number within the round.
            call: Returns the loss of a micro-batch; it is not scaled here.
            seed: The seed of torch's generators; None: they go on.

        Returns:
            The loss, detached, and where the rest of its backward begins.
        """
        rounds = self._arrangement.rounds
        with self._turn(place, seed, with_gradients=True) as turn:
            loss = call()
            if not self._arrangement.executor.spec.heads_in_turn:
                return loss.detach(), loss
            self.lockstep.wait_for_earlier()
            with rounds.in_head():
                root = self._head_backward.begin(loss, turn.cuts, place, rounds.num_together - 1 - place)
            self._arrangement.executor.end_head()
            return loss.detach(), root

    @contextmanager
    def _turn(self, place: int, seed: int | None, *, with_gradients: bool) -> Iterator[Turn]:
        if seed is not None:
            torch.manual_seed(seed)
        self.current = turn = Turn(place, is_before=not with_gradients)
        try:
            with torch.set_grad_enabled(with_gradients):
                yield turn
        finally:
            self.current = None

    def give_way_to_pass(self) -> None:
        """Let the others begin their next pass in the order of the first: they have come from the head."""
        if self.current is not None and self.current.has_passed:
            self.lockstep.give_way(-1)

    def give_way_to_head(self) -> None:
        """Let the others pass the last layer: all have the head's weights together, one after the other."""
        if self.current is not None or self._arrangement.choice.outer_streams:
            self.lockstep.give_way(self._num_layers)
