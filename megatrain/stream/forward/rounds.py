"""What passes of the model are expected: rounds of a step, their visits, and the passes since a backward.

A round's visits are what its layers and their policies say (`round_visits`), until a round was seen to go
another way; then the next one of as many micro-batches is expected to go as that one did. So a loss that runs
the model more than once is foreseen from its second round on. Passes that are announced to come before a
round's losses, such as those of a reference, are foreseen from the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from megatrain.config.choice import Choice
from megatrain.config.policies import Policy
from megatrain.config.runs import Runs, StepSums, SumRoom
from megatrain.errors import ConfigError, ModelError
from megatrain.plan.program.visits import HEAD, Round, Visit, marked, pass_visits, step_visits
from megatrain.store.precision import Precision
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.passed import Passed, StepVisits
from megatrain.stream.ranks.same_step import SameStep

_MOST_PASSES = 8
"""Of a call without gradients, for the next one to be foreseen as it was."""


class Rounds:
    """Foresees rounds, and notes what came of them."""

    def __init__(self, executor: Executor, choice: Choice, num_runs: int = 1) -> None:
        """Expect nothing yet of steps of so many runs."""
        self._num_runs = num_runs
        self._executor = executor
        self._gradients = executor.gradients
        self._same = SameStep(self._gradients.shared.ranks)
        self._choice = choice
        self.plans = executor.spec.layers
        self.first_trained = executor.spec.first_trained
        """The first layer that backward reaches: what is before it has nothing to train."""
        self.micro_batch = 0
        """Number within its round of the pass that begins next."""
        self.num_together = 1
        """Micro-batches of the round that is going on."""
        self._kind = Round()
        """How the micro-batches of the round pass the model, but for their number."""
        self._orders: dict[Round, list[Visit]] = {}
        self._bare: dict[Round, list[Visit]] = {}
        """What is expected to be seen of a round, by its kind."""
        self._passes: dict[int, list[Visit]] = {}
        """What is expected of calls without gradients that pass together, by their number."""
        self._steps: dict[tuple[tuple[int, ...], int], list[Visit]] = {}
        """The visits of whole steps, by the micro-batches of their rounds and the passes before these."""
        self._going: StepVisits | None = None
        self._passes_foreseen = 0
        self._passes_since_backward = 0
        self.in_step = False
        """A step was foreseen whose calls are going on: whatever passes in them belongs to its rounds."""
        self._adds_up = False
        self._in_backward = False
        self._in_head = False
        self._completes = False
        """The caller's round is the first, and may be the last: its gradients are rounded when it ends."""

    @property
    def adds_up(self) -> bool:
        """Whether gradients of the pass that begins now add to others."""
        return self._adds_up or self._passes_since_backward > 1

    @property
    def call(self) -> int:
        """The call of the round to which the pass that begins now belongs; 0: of none."""
        return self.micro_batch % self.num_together if self.in_step else 0

    @property
    def _rounds_first(self) -> bool:
        """Whether gradients are rounded when the caller's round ends: all of its passes were announced."""
        is_whole = self._passes_since_backward == self.num_together
        return self._completes and not self.in_step and is_whole

    @property
    def is_open(self) -> bool:
        """Whether a forward waits for its backward, or a backward is going on."""
        return self._passes_since_backward > 0 or self._in_backward

    @property
    def is_broken(self) -> bool:
        """Whether a backward of the caller's has ended in an exception, or a copy has failed."""
        ended = self._in_backward and torch._C._current_graph_task_id() == -1
        return ended or self._executor.integrity.has_failed

    def recover(self) -> None:
        """Drop a round that is broken.

        Raises:
            ModelError: Gradients are there, of which it has lost a part.
        """
        if not self.is_broken:
            return
        if self._gradients.blocks:
            raise ModelError(
                "a backward of this step has ended in an error, and a part of its gradients is lost; call "
                "opt.zero_grad(), then run the step again"
            )
        self.drop()

    def drop_gradients(self) -> None:
        """Drop what the step has gathered so far.

        Raises:
            ConfigError: The step has updated blocks already.
        """
        if self.is_broken:
            self.drop()
        elif self._executor.integrity.is_changing:
            raise ConfigError(
                "with updates=immediate, the gradients have updated their blocks already and cannot be "
                "dropped; call opt.step() to finish the step"
            )
        self._gradients.clear()

    def foresee_step(self, sizes: Sequence[int], num_before: int = 0) -> None:
        """Foresee the rounds of a whole step.

        Args:
            sizes: The number of micro-batches of each round.
            num_before: The number of passes without gradients that come before the losses of each round.

        Raises:
            ConfigError: The micro-batches cannot be cut into the step's runs, or another rank would take
                another step.
        """
        gradients = self._gradients
        sums = self._sums_of(sizes)
        if not gradients.buffers.room.holds(sums.on_device):
            raise ConfigError(
                f"a step of {sum(sizes)} micro-batches on each rank, in rounds of {sizes[0]}, has more "
                "partial sums on the device than there is room for; give attach the batch of such a step "
                "(StepBatch), or use another memory.lockstep"
            )
        gradients.run_sums.runs, gradients.run_sums.are_shared = sums.runs_at_once, sums.are_shared
        self._make_room(sizes, sums)
        heads_in_turn = self._executor.spec.heads_in_turn
        self._kind = Round(num_passes_before=num_before, heads_in_turn=heads_in_turn)
        visits = self._steps.get((tuple(sizes), num_before))
        if visits is None:
            visits = self._steps[tuple(sizes), num_before] = step_visits(
                lambda size, loads, completes: self.visits(size, loads=loads, completes=completes),
                sizes,
                sums.by_round,
            )
        self._same.check(self._executor.spec, visits)
        self._going = StepVisits(visits)
        self._executor.foresee(visits, of_all=True)
        self.num_together, self.in_step = sizes[0], True

    def foresee_round(self, num_micro_batches: int) -> bool:
        """Foresee a round that the caller begins: whether others follow is not known.

        Returns:
            Whether its micro-batches pass each layer together. Where a layer has more fragments than there
            are buffers for gradients, which then add up at the same time, they pass the model one after the
            other, the last one first.

        Raises:
            ConfigError: A step has several runs, which only a whole step can be cut into.
            ModelError: Gradients are there already, and an immediate update has used them up.
        """
        has_gradients = bool(self._gradients.blocks)
        if self._num_runs * self._gradients.shared.ranks.size > 1:
            raise ConfigError(
                "a step has several runs (parallel.shards) or ranks, so all of its micro-batches have to be "
                "known: give them to engine.forward_backward or engine.run_losses, and do not call "
                "model(...).loss.backward()"
            )
        if has_gradients and self._executor.is_immediate:
            raise ModelError(
                "a second backward before opt.step(): with updates=immediate, the first one has updated the "
                "weights already; give all micro-batches to engine.forward_backward, or use deferred"
            )
        self._kind = Round(heads_in_turn=False)
        self._completes = not has_gradients
        completes = not has_gradients or self._executor.host.precision is Precision.FP32
        visits = self.visits(num_micro_batches, loads=has_gradients, completes=completes)
        if not self._executor.spec.has_buffers(visits):
            self._kind = Round(heads_in_turn=False, in_succession=True)
            visits = self.visits(num_micro_batches, loads=has_gradients, completes=completes)
        in_succession = self._kind.in_succession
        num_sums = num_micro_batches if in_succession else 1
        self._prepare_gradients(
            num_rounds=num_sums + has_gradients, adds_up=has_gradients or num_micro_batches > 1
        )
        self._executor.foresee(visits)
        self._passes_foreseen = self.num_together = num_micro_batches
        return not in_succession

    def foresee_evaluation(self) -> None:
        """Foresee one pass through all layers without a backward, unless it is a part of a step's round."""
        if self.in_step:
            return
        self._executor.foresee(pass_visits(self.plans, ends=self._executor.spec.ends))
        self.micro_batch = 0

    def foresee_passes(self, num_together: int) -> None:
        """Foresee calls without gradients that pass all layers together, once, or as such calls last did."""
        visits = self._passes.get(num_together)
        if visits is None:
            visits = pass_visits(self.plans, num_together, ends=self._executor.spec.ends)
            self._passes[num_together] = visits
        self._executor.foresee(visits)

    def end_passes(self, num_together: int) -> None:
        """Take note that these calls are over: if they went another way, the next ones are expected to."""
        seen, ends = self._executor.take_seen(), self._executor.spec.ends
        self.micro_batch = 0
        if seen == [visit.bare for visit in self._passes[num_together]]:
            return
        once = len(pass_visits(self.plans, num_together, ends=ends))
        if (
            len(seen) <= _MOST_PASSES * once
        ):  # a text that is generated passes once per token, and never again
            self._passes[num_together] = marked(seen, loads=False, completes=True, heads=ends.heads)

    def begin_pass(self) -> None:
        """Count a pass with gradients; one that nobody has announced is a round of its own."""
        self._passes_since_backward += 1
        if self.in_step:
            return
        if not self._passes_foreseen:
            self.micro_batch = self._passes_since_backward - 1
            self.foresee_round(1)
        self._passes_foreseen -= 1

    def begin_backward(self) -> None:
        """Take note that autograd reaches a block: `_end_backward` follows when it is done."""
        if self._in_backward:
            return
        self._executor.is_rounded = self._rounds_first or (self.in_step and not self.adds_up)
        if not self._in_head:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    @contextmanager
    def in_head(self) -> Iterator[None]:
        """Let a backward of a head run by itself: that of the round is not begun by it."""
        self._in_head = True
        try:
            yield
        finally:
            self._in_head = False

    def visits(self, num_micro_batches: int, *, loads: bool, completes: bool) -> list[Visit]:
        """List the visits of a round."""
        kind = replace(self._kind, num_micro_batches=num_micro_batches)
        order = self._orders.get(kind)
        if order is not None:
            heads = self._executor.spec.ends.heads
            return marked(order, loads=loads, completes=completes, heads=heads)
        return self._executor.spec.visits(replace(kind, loads=loads, completes=completes))

    def passed(self) -> Passed | None:
        """Return how far the newest whole step has come, on any thread; None: there was none."""
        if self._going is None:
            return None
        layers = zip(self.plans, self._choice.policies, strict=True)
        again = {block: 1.0 for plan, policy in layers if policy.reruns_whole for block in plan.blocks}
        return self._going.passed(self._executor.lanes, self._executor.spec.outer, again)

    @property
    def forwards_again(self) -> list[int]:
        """How often a step runs each layer's forward again, whole, for each micro-batch."""
        forwards = [v.block for v in self.visits(1, loads=False, completes=True) if not v.is_backward]
        return [
            max(0, forwards.count(plan.blocks[-1]) - 1)
            + (policy.reruns_whole and number >= self.first_trained)
            for number, (plan, policy) in enumerate(zip(self.plans, self._choice.policies, strict=True))
        ]

    @property
    def parts_again(self) -> dict[int, Policy]:
        """The policies, by layer, of those of whose forward a step runs a part again."""
        policies = enumerate(self._choice.policies)
        return {n: policy for n, policy in policies if policy.keeps_results and n >= self.first_trained}

    def drop(self, error: BaseException | None = None) -> None:
        """Drop an unfinished step after an exception; None: the caller has seen it.

        That is a loss of the whole state if the step has changed some of it.
        """
        self._in_backward = self.in_step = False
        self._passes_foreseen = 0
        self._passes_since_backward = 0
        self._executor.abandon(error)
        self._gradients.clear()

    def make_room(self, sizes: Sequence[int]) -> None:
        """Allocate and page-lock ahead what the gradients of such a step need, so that no step waits for it.

        Args:
            sizes: The number of micro-batches of each round.
        """
        self._make_room(sizes, self._sums_of(sizes))

    def _make_room(self, sizes: Sequence[int], sums: StepSums) -> None:
        adds_up = sum(sizes) > 1 or self._gradients.shared.ranks.size > 1
        kept = sums.between(is_wide=self._executor.host.precision is Precision.BF16)
        self._prepare_gradients(num_rounds=len(sizes), adds_up=adds_up, kept=kept)

    def _sums_of(self, sizes: Sequence[int]) -> StepSums:
        """Return the partial sums of a step with rounds of these sizes."""
        shared, on_drives = self._gradients.shared, self._gradients.buffers.sums_on_drives
        runs = Runs.of(self._num_runs, sum(sizes))
        return StepSums(runs, tuple(sizes), shared.ranks.size, shared.sequence, on_drives)

    def _prepare_gradients(self, *, num_rounds: int, adds_up: bool, kept: SumRoom | None = None) -> None:
        self._adds_up = adds_up
        self._executor.gradients.prepare(adds_up=adds_up, num_rounds=num_rounds, kept=kept)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._executor.end_backward()
        seen = self._executor.take_seen()
        if self._rounds_first and self._executor.host.precision is Precision.BF16:
            self._executor.gradients.round_residents()
        passes, self._passes_since_backward = self._passes_since_backward, 0
        if self._kind.in_succession:
            return
        passes = self.num_together if self.in_step else passes  # a call of a step may be several passes
        kind = replace(self._kind, num_micro_batches=passes)
        if kind not in self._bare:
            visits = self.visits(passes, loads=False, completes=True)
            outer = set(self._executor.spec.outer)
            self._bare[kind] = [visit.bare for visit in visits if visit.block not in {HEAD, *outer}]
        is_new = passes == self.num_together and seen != self._bare[kind]
        if is_new and self._executor.spec.has_buffers(marked(seen, loads=False, completes=True)):
            self._orders[kind] = self._bare[kind] = seen
            self._steps.clear()
