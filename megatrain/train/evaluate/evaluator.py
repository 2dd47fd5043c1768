"""The evaluator decides when a run is evaluated, and what follows from the results."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.config.sections.eval import EvalConfig
from megatrain.config.types import steps_between
from megatrain.data.cache import Rows
from megatrain.distributed.alone import ALONE, Alone
from megatrain.errors import ConfigError
from megatrain.stream.engine import Engine
from megatrain.train.evaluate.best_tracker import BestTracker
from megatrain.train.evaluate.chat import Chat
from megatrain.train.evaluate.losses import EvalSet, Evaluation, evaluate, undisturbed
from megatrain.train.evaluate.prompts import continue_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The findings of one evaluation of the model after a step."""

    step: int
    evaluations: Sequence[Evaluation]
    texts: Sequence[tuple[str, str]]
    """The pairs of a prompt and its continuation, or its answer (`eval.chat`)."""
    is_best: bool

    @property
    def numbers(self) -> dict[str, float]:
        """Return the losses by transformers' names: `eval_loss`, or `eval_NAME_loss` for several sets."""
        found: dict[str, float] = {}
        for one in self.evaluations:
            name = "eval" if len(self.evaluations) == 1 else f"eval_{one.name}"
            found |= {f"{name}_{key}": value for key, value in one.numbers.items()}
            found[f"{name}_runtime"] = one.seconds
        return found


class Evaluator:
    """Evaluates a run at the steps that its settings name, and knows the best."""

    def __init__(
        self, settings: EvalConfig, sets: Sequence[EvalSet], *, num_steps: int, steps_per_epoch: int
    ) -> None:
        """Make an evaluator; nothing is evaluated yet.

        Args:
            settings: The evaluation settings of the run.
            sets: The held-out data; without any, only prompts are continued.
            num_steps: The number of steps of the whole run.
            steps_per_epoch: The number of steps of one pass over the data.

        Raises:
            ConfigError: `eval.metric` names no set.
        """
        self._settings = settings
        self._sets = sets
        self._num_steps = num_steps
        self._every = steps_between(settings.every, steps_per_epoch)
        names = [one.name for one in sets]
        if settings.metric is not None and settings.metric not in names:
            raise ConfigError(f"eval.metric is {settings.metric}; the eval sets are {', '.join(names)}")
        self._deciding = settings.metric or (names[0] if names else None)
        self.best_tracker = BestTracker()

    @property
    def notes(self) -> list[str]:
        """Return notes about an early stop that would need more evaluations than the run has."""
        patience, last_step = self._settings.patience, self._num_steps - 1
        if patience is None or self._deciding is None:
            return []
        times = 0 if self._every is None else last_step // self._every
        if times > patience:
            return []
        often = last_step // (patience + 1)
        way = f"eval.every={often} is often enough" if often else "it is too short for that"
        return [
            f"eval.patience={patience} cannot end this run early: {patience + 1} evaluations before its last "
            f"step are the fewest that can, and it has {times}; {way}"
        ]

    @property
    def rows(self) -> list[Rows]:
        """Return the rows of all sets."""
        return [one.rows for one in self._sets if one.rows is not None]

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after `step`."""
        if not (self._sets or self._settings.prompts) or step == self.best_tracker.evaluated_step:
            return False
        if step == 0:
            return self._settings.at_start
        if step == self._num_steps:
            return self._settings.at_end
        return self._every is not None and step % self._every == 0

    def evaluate(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, step: int, ranks: Ranks | Alone = ALONE
    ) -> Outcome:
        """Evaluate after `step`; no bit of training changes.

        The model before the first step is no candidate for the best one. All ranks call this: they share the
        batches out, and the first one continues the prompts.
        """
        settings, tracker = self._settings, self.best_tracker
        found = evaluate(engine, self._sets, most_batches=settings.batches, ranks=ranks)
        texts: list[tuple[str, str]] = []
        if settings.prompts:
            engine.settle()  # the first rank reads what the others have made
        if settings.prompts and ranks.rank == 0:
            with undisturbed(engine):
                texts = [(prompt, self._answer(engine, tokenizer, prompt)) for prompt in settings.prompts]
        tracker.evaluated_step = step
        deciding = next((one for one in found if one.name == self._deciding), None)
        is_best = (
            step > 0
            and deciding is not None
            and tracker.take(step, deciding.loss, deciding.name, min_delta=settings.min_delta)
        )
        outcome = Outcome(step=step, evaluations=found, texts=texts, is_best=is_best)
        if ranks.rank == 0:
            self._say(outcome)
        return outcome

    def _answer(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """Return a prompt with its continuation or its answer, or the reason why there is none.

        A prompt for which the model has no room does not end a run.
        """
        most = self._settings.max_new_tokens
        try:
            if self._settings.chat:
                return Chat(engine.model, tokenizer, max_new_tokens=most).ask(prompt)
            return continue_text(engine.model, tokenizer, prompt, max_new_tokens=most)
        except ConfigError as error:
            return f"({error})"

    @property
    def kept_steps(self) -> set[int]:
        """The steps whose checkpoints are kept, however old."""
        best = self.best_tracker.best_step
        return {best} if best is not None and self._settings.keep_best else set()

    @property
    def wants_stop(self) -> bool:
        """Whether the loss has not fallen for as long as `eval.patience` says."""
        patience = self._settings.patience
        return patience is not None and self.best_tracker.worse_in_a_row >= patience

    def stop(self) -> str:
        """Record that the run ends here, and return the reason."""
        tracker = self.best_tracker
        tracker.has_stopped = True
        if tracker.best_loss is None:
            return f"the loss on {self._deciding} was finite in no evaluation (eval.patience)"
        return (
            f"the loss on {tracker.best_set} was {tracker.best_loss:.4f} after step {tracker.best_step}, "
            f"and no better in {tracker.worse_in_a_row} evaluations since (eval.patience)"
        )

    def _say(self, outcome: Outcome) -> None:
        for one in outcome.evaluations:
            best = ", the best so far" if outcome.is_best and one.name == self._deciding else ""
            _log.info("evaluation after step %d on %s: %s%s", outcome.step, one.name, one.describe(), best)
        for _, text in outcome.texts:
            _log.info("sample after step %d: %s", outcome.step, text)
