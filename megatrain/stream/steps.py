"""Runs an engine's steps from zero gradients, and drops one that an error has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.model.sequence.attention import SharedRows
from megatrain.stream.failures import explained
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.model_forward import ModelForward
from megatrain.stream.meter import StepMeter
from megatrain.stream.ranks.given_up import StepMeeting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PassBefore:
    """A pass of every micro-batch without gradients, before the losses: of a reference, for instance.

    It is a part of the step's program: those of a round pass each layer together, before the round's losses.
    """

    calls: Sequence[Callable[[], object]]
    """One per micro-batch, which passes the model once and keeps what it has found."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around the calls of each round, and left before its losses: adapters are off, for instance."""


class Steps:
    """The steps of one engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        forward: ModelForward,
        arrangement: Arrangement,
        meter: StepMeter,
        rows: SharedRows | None = None,
    ) -> None:
        """Run steps of `model` through its `forward`; `rows` says who shares them out, None: nobody does."""
        self._rows = rows
        self._model = model
        self._forward = forward
        self._arrangement = arrangement
        self._meter = meter
        shared = arrangement.gradients.shared
        self._meeting = StepMeeting(shared.ranks, shared.sequence)

    @property
    def takes_order(self) -> bool:
        """Whether what a row computes depends on the rows before it, so calls keep their order."""
        return self._forward.turns.frequencies.are_there

    def run(
        self,
        losses: Sequence[Callable[[], Tensor]],
        seeds: Sequence[int] | None,
        num_targets: int | None = None,
        *,
        only_loss: bool = False,
        has_plain_loss: bool = False,
        before: Sequence[PassBefore] = (),
    ) -> list[Tensor]:
        """Run a step: for each round the passes before its losses, the losses, and their backward.

        Args:
            losses: The calls, one per micro-batch, each of which returns its loss.
            seeds: The seeds, one per micro-batch; None: they are drawn if the calls take turns.
            num_targets: The number of tokens that the step trains on; None: counted as they pass.
            only_loss: A claim that the calls use nothing but the loss that the model returns: its head may
                run in chunks.
            has_plain_loss: A claim that each call returns the loss of one pass as the model has computed it.
            before: The passes that come before the losses of each round.

        Returns:
            The losses, detached, in order.

        Raises:
            ConfigError: No loss, one that is no real number with a gradient, not one seed per loss, or a step
                inside a step.
        """
        self._check(losses, seeds, before)
        arrangement, turns = self._arrangement, self._forward.turns
        rounds, together = arrangement.rounds, arrangement.choice.lockstep
        if seeds is None and together > 1 and len(losses) > 1:
            seeds = torch.randint(2**62, (len(losses),)).tolist()
        self.zero_grad()
        self._meter.begin(num_targets)
        found: list[Tensor] = []

        def seed_of(number: int, order: int = 0) -> int | None:
            return None if seeds is None else seeds[number] + order

        try:
            self._forward.head.only_loss = only_loss
            arrangement.binding.check()
            numbers = range(len(losses))
            of_rounds = [numbers[first : first + together] for first in numbers[::together]]
            rounds.foresee_step([len(numbers) for numbers in of_rounds], len(before))
            self._meeting.begin()
            arrangement.offloaded.begin_step()
            in_turn = arrangement.executor.spec.heads_in_turn
            for numbers in of_rounds:
                rounds.num_together = len(numbers)
                arrangement.gradients.run_sums.begin_round(numbers)
                for order, each in enumerate(before):
                    with each.around():
                        self._pass_together([(each.calls[n], seed_of(n, order + 1)) for n in numbers])
                calls = [
                    partial(
                        self._loss,
                        place,
                        number,
                        losses[number],
                        seed_of(number),
                        has_plain_loss=has_plain_loss,
                    )
                    for place, number in enumerate(numbers)
                ]
                parts = turns.run(calls, heads_in_turn=in_turn) if len(calls) > 1 else [calls[0]()]
                torch.autograd.backward([root for _, root in parts])
                found += [loss for loss, _ in parts]
            self._meeting.come()
        except BaseException as error:
            try:
                lost = self._meeting.come_early(error, arrangement.executor)
            finally:
                self.drop(error)
            if lost is not None:
                raise lost from error
            instead = explained(error, self._model, arrangement.lanes.device)
            if instead is not None:
                raise instead from error
            raise
        finally:
            rounds.in_step = self._forward.head.only_loss = False
        return found

    def _check(
        self,
        losses: Sequence[Callable[[], Tensor]],
        seeds: Sequence[int] | None,
        before: Sequence[PassBefore],
    ) -> None:
        """Refuse what is no step; see `run`."""
        if self._rows is not None and not self._rows.is_active:
            raise ConfigError(
                f"engine.run_losses calls the model on whole rows, but {self._rows.number} ranks share "
                "them out (parallel.sequence); use engine.forward_backward, or parallel.sequence=1"
            )
        if not losses:
            raise ConfigError("a step needs at least one micro-batch; the list is empty")
        if self._arrangement.rounds.in_step:
            raise ConfigError("a loss of engine.run_losses has begun another step; call the model in it")
        if seeds is not None and len(seeds) != len(losses):
            raise ConfigError(f"the step got {len(seeds)} seeds for {len(losses)} micro-batches")
        for number, each in enumerate(before):
            if len(each.calls) != len(losses):
                raise ConfigError(
                    f"pass {number} before the losses has {len(each.calls)} calls for {len(losses)} "
                    "micro-batches"
                )

    def _loss(
        self,
        place: int,
        number: int,
        call: Callable[[], Tensor],
        seed: int | None,
        *,
        has_plain_loss: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run the loss of a micro-batch, and the backward of its head, if that can run by itself.

        Args:
            place: The place of the micro-batch in its round.
            number: The number of the micro-batch in the step.
            call: The function that returns the loss, which is not scaled here.
            seed: The seed of torch's generators; None: they go on.
            has_plain_loss: A claim that it is the loss of one pass as the model has computed it.

        Returns:
            The loss, detached, and where the rest of its backward begins.
        """
        with self._forward.turns.turn(
            place, seed, with_gradients=True, has_plain_loss=has_plain_loss
        ) as turn:
            loss = call()
            _check_loss(loss, number)
            return loss.detach(), self._forward.turns.go_back(turn, loss)

    def run_passes(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run calls without gradients, between two steps; see `Together.run`.

        Raises:
            ConfigError: A step is going on, or one of these calls has begun this.
        """
        rounds = self._arrangement.rounds
        if rounds.in_step or self._forward.turns.lockstep.is_running:
            raise ConfigError(
                "engine.together.run was called within a step, or by one of its own calls; call the model "
                "there"
            )
        if not calls:
            return []
        self._meter.pause()
        rounds.foresee_passes(len(calls))
        found = self._pass_together([(call, None) for call in calls])
        rounds.end_passes(len(calls))
        return found

    def _pass_together(self, calls: Sequence[tuple[Callable[[], T], int | None]]) -> list[T]:
        """Run calls without gradients, each with its seed, that take turns at every layer."""

        def run(place: int, call: Callable[[], T], seed: int | None) -> T:
            with self._forward.turns.turn(place, seed, with_gradients=False):
                return call()

        turns = [partial(run, place, *each) for place, each in enumerate(calls)]
        return self._forward.turns.run(turns) if len(turns) > 1 else [turns[0]()]

    def zero_grad(self) -> None:
        """Drop the gradients gathered since the last step."""
        if self._arrangement.gradients.blocks:
            self._meter.drop()
        self._arrangement.rounds.drop_gradients()

    def drop(self, error: BaseException) -> None:
        """Drop a step that an error has ended; a loss of the state if it was changed before."""
        self._arrangement.rounds.drop(error)
        self._meter.drop()


def _check_loss(found: object, number: int) -> None:
    """Refuse the loss of a micro-batch from which no backward can begin."""
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"tensor {tuple(found.shape)} of {found.dtype}"
        raise ConfigError(f"loss {number} of the step returned a {what}; return a real 0-dim tensor")
    if not found.requires_grad:
        raise ConfigError(
            f"loss {number} of the step has no gradient: it was computed without the model, or under no_grad"
        )
