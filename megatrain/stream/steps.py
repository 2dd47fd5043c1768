"""Runs an engine's steps from zero gradients, and drops one that an error has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from megatrain.config.runs import Runs, in_order, num_places
from megatrain.errors import ConfigError, DataError
from megatrain.model.head import count_targets
from megatrain.model.sequence.attention import SharedRows
from megatrain.model.sequence.rows import cut_rows
from megatrain.stream.failures import explained
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.model_forward import ModelForward
from megatrain.stream.meter import StepMeter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

S = TypeVar("S")
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

    @property
    def takes_order(self) -> bool:
        """Whether what a row computes depends on the rows before it, so calls keep their order."""
        return self._forward.turns.frequencies.are_there

    def run(
        self,
        losses: Sequence[Callable[[], Tensor]],
        seeds: Sequence[int] | None,
        num_targets: int | None,
        *,
        only_loss: bool = False,
        before: Sequence[PassBefore] = (),
    ) -> list[Tensor]:
        """Run a step's calls and their backward; see `Engine.run_losses`.

        Args:
            losses: One per micro-batch.
            seeds: One per micro-batch; None: they are drawn if the calls take turns.
            num_targets: Tokens that the step trains on; None: counted as they pass.
            only_loss: As in `ModelForward.only_loss`.
            before: Passes that come before the losses of each round.

        Raises:
            ConfigError: No loss, one that is no real number with a gradient, not one seed per loss, or a step
                inside a step.
        """
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
        if seeds is None and self._arrangement.choice.lockstep > 1 and len(losses) > 1:
            seeds = torch.randint(2**62, (len(losses),)).tolist()
        self.zero_grad()
        self._meter.begin(num_targets)
        try:
            checked = [partial(_checked, number, loss) for number, loss in enumerate(losses)]
            with self._forward.only_loss(only_loss):
                return self._run(checked, seeds, before)
        except BaseException as error:
            self.drop(error)
            instead = explained(error, self._model, self._arrangement.lanes.device)
            if instead is not None:
                raise instead from error
            raise

    def run_passes(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run calls without gradients that take turns at every layer; see `Together.run`.

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
        found = self._together(self._forward.turns.take, calls, range(len(calls)), None)
        rounds.end_passes(len(calls))
        return found

    def _run(
        self,
        losses: Sequence[Callable[[], Tensor]],
        seeds: Sequence[int] | None,
        before: Sequence[PassBefore],
    ) -> list[Tensor]:
        """Run rounds: the passes before their losses, the losses, their backward. Return these, detached."""
        self._arrangement.binding.check()
        rounds, together = self._arrangement.rounds, self._arrangement.choice.lockstep
        numbers = range(len(losses))
        numbers_of_rounds = [numbers[first : first + together] for first in numbers[::together]]
        rounds.foresee_step([len(numbers) for numbers in numbers_of_rounds], len(before))
        found: list[Tensor] = []
        try:
            for numbers in numbers_of_rounds:
                rounds.num_together = len(numbers)
                self._arrangement.gradients.run_sums.begin_round(numbers)
                for order, each in enumerate(before):
                    own = None if seeds is None else [seed + 1 + order for seed in seeds]
                    with each.around():
                        self._together(self._forward.turns.take, each.calls, numbers, own)
                in_turn = self._arrangement.executor.spec.heads_in_turn
                take_loss = self._forward.turns.take_loss
                parts = self._together(take_loss, losses, numbers, seeds, heads_in_turn=in_turn)
                torch.autograd.backward([root for _, root in parts])
                found += [loss for loss, _ in parts]
        finally:
            rounds.in_step = False
        return found

    def _together(
        self,
        take: Callable[[int, Callable[[], S], int | None], T],
        calls: Sequence[Callable[[], S]],
        numbers: Sequence[int],
        seeds: Sequence[int] | None,
        *,
        heads_in_turn: bool = True,
    ) -> list[T]:
        """Let those of the calls that have these numbers take their turns, and return what comes of each."""
        turns = [
            partial(take, place, calls[number], None if seeds is None else seeds[number])
            for place, number in enumerate(numbers)
        ]
        return self._forward.turns.run(turns, heads_in_turn=heads_in_turn)

    def run_batches(self, micro_batches: Sequence[Mapping[str, Any]], seeds: Sequence[int] | None) -> Tensor:
        """Run a step of the model's own loss; see `Engine.forward_backward`."""
        batches, counts = _read_micro_batches(micro_batches)
        rows = self._rows
        if rows is not None:
            batches = [cut_rows(batch, rows) for batch in batches]
            counts = [*map(count_targets, batches)]
        ranks, sequence = self._arrangement.binding.ranks, self._arrangement.binding.sequence
        total, number = own, _ = sum(counts), len(batches)
        if ranks is not None:
            total, number = torch.stack(ranks.gather(torch.tensor([own, number]))).sum(0).tolist()
            number //= sequence
        if total == 0:
            raise DataError("the step has no token to train on: every label is -100; check the data's labels")
        loss_of = partial(self._forward.loss_of, total=total, num_micro_batches=number)
        with nullcontext() if rows is None else rows.active():
            losses = self.run([*map(loss_of, batches, counts)], seeds, own)
        if ranks is not None:  # those of all ranks, in the order of one
            found = [list(each) for each in ranks.gather(torch.stack(losses))]
            losses = in_order(self.parts(len(losses) * len(found) // sequence), found, sequence)
        return reduce(torch.add, losses)

    def parts(self, count: int) -> list[list[int]]:
        """Return which of a step's `count` micro-batches each rank is given, by their numbers.

        Raises:
            ConfigError: They cannot be cut into the step's runs.
        """
        binding = self._arrangement.binding
        size = 1 if binding.ranks is None else binding.ranks.size
        runs = Runs.of(binding.runs.number * num_places(size, binding.sequence), count)
        return runs.parts(self._arrangement.choice.lockstep, size, binding.sequence)

    def zero_grad(self) -> None:
        """Drop the gradients gathered since the last step."""
        if self._arrangement.gradients.blocks:
            self._meter.drop()
        self._arrangement.rounds.drop_gradients()

    def drop(self, error: BaseException) -> None:
        """Drop a step that an error has ended; a loss of the state if it was changed before."""
        self._arrangement.rounds.drop(error)
        self._meter.drop()


def _checked(number: int, loss: Callable[[], Tensor]) -> Tensor:
    """Return the loss of a micro-batch, if a backward can begin there."""
    found: object = loss()
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"tensor {tuple(found.shape)} of {found.dtype}"
        raise ConfigError(f"loss {number} of the step returned a {what}; return a real 0-dim tensor")
    if not found.requires_grad:
        raise ConfigError(
            f"loss {number} of the step has no gradient: it was computed without the model, or under no_grad"
        )
    return found


def _read_micro_batches(
    micro_batches: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Return a step's micro-batches as a list, and the tokens to train on in each.

    Raises:
        ConfigError: There is none, or one that is not in a list.
        DataError: No labels.
    """
    if isinstance(micro_batches, Mapping):
        raise ConfigError("forward_backward takes a list of micro-batches; put the one batch into a list")
    batches = list(micro_batches)
    if not batches:
        raise ConfigError("forward_backward got no micro-batch; pass a list of at least one")
    return batches, [count_targets(batch) for batch in batches]
