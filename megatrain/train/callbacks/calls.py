"""Calls callbacks as transformers' Trainer does: the same events, with the same objects.

After each step, `Callbacks.control` holds the wishes of the callbacks (to stop, save, log or evaluate). One
that raises is not called again, and the loop asks for `failure` between two steps, when the state is whole. A
tracker that raises is called again: it costs what it should have logged, and never the run. Every rank calls
its own callbacks, and between two steps all ranks take over the wishes of the first one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from megatrain.config import Config
from megatrain.config.sizes import counted
from megatrain.distributed.alone import ALONE, Alone
from megatrain.distributed.processes import OF_RANK
from megatrain.errors import CallbackError, ConfigError
from megatrain.train.callbacks.named import is_tracker

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from megatrain.distributed.ranks import Ranks


_log = logging.getLogger(__name__)

_FIRST = "on_train_begin"
"""The event in which a tracker signs in: one that fails there has logged nothing, and ends the run."""

_WITHIN_A_STEP = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step")
"""The events after which ranks go on without a word; what is wished in them counts at the step's end."""


class Failure(NamedTuple):
    """A callback that has raised."""

    name: str
    event: str
    said: str
    """What it has raised, in words."""
    error: Exception | None = None
    """The error itself, on the rank where it was raised."""


class Callbacks:
    """The callbacks of a run, with the state and the control that they are given."""

    def __init__(
        self,
        members: Sequence[TrainerCallback],
        config: Config,
        *,
        num_steps: int,
        steps_per_epoch: int,
        objects: Mapping[str, Any],
        ranks: Ranks | Alone = ALONE,
    ) -> None:
        """Make the objects that callbacks are given; without callbacks, nothing is made.

        Args:
            members: The callbacks, in the order of their calls.
            config: The settings of the run.
            num_steps: The number of steps of the whole run.
            steps_per_epoch: The number of steps of one pass over the data.
            objects: The further objects of each call: model, processing_class, optimizer, lr_scheduler.
            ranks: The ranks that train together, each with callbacks of its own.

        Raises:
            ConfigError: A package that transformers' arguments need is not installed.
        """
        self._members = list(members)
        self._objects = objects
        self._steps_per_epoch = steps_per_epoch
        self._ranks = ranks
        self._wishes: dict[str, bool] = {}
        self._missed: dict[str, int] = {}
        """By tracker, the number of its calls that have failed."""
        self.failure: Failure | None = None
        """The first callback that has raised."""
        self.control: TrainerControl | None = None
        self.state: TrainerState | None = None
        if members:
            from transformers import TrainerControl, TrainerState

            self._arguments = training_arguments(config, num_steps)
            self.control, self.state = TrainerControl(), TrainerState()
            self.state.log_history = []
            self.state.max_steps = num_steps
            self.state.num_train_epochs = -(-num_steps // steps_per_epoch)
            self.state.train_batch_size = config.train.micro_batch_size
            self.state.logging_steps = config.log.every
            self.state.is_world_process_zero = ranks.rank == 0
            self.state.is_local_process_zero = ranks.local_rank == 0

    def call(self, event: str, **values: Any) -> None:
        """Call each callback's method of this name; the beginning of a step clears earlier wishes."""
        if event == "on_step_begin" and self.control is not None:
            self.control.should_log = self.control.should_save = self.control.should_evaluate = False
        for member in list(self._members):
            try:
                changed = getattr(member, event)(
                    self._arguments, self.state, self.control, **self._objects, **values
                )
            except Exception as error:  # a user's code or a tracker may raise anything
                if is_tracker(member) and event != _FIRST:
                    self._miss(member, event, error)
                else:
                    self._drop(member, event, error)
            else:
                self.control = changed or self.control
        if event not in _WITHIN_A_STEP:
            self.agree()
        if event == "on_train_end":
            for name, count in self._missed.items():
                _log.warning("%s of %s have failed: it lacks rows", counted(count, "call"), name)

    def agree(self) -> None:
        """Take over what the first rank's callbacks wish, and a failure on any rank; all ranks call it."""
        own = {} if self.control is None else wishes_of(vars(self.control))
        failed = None if self.failure is None else self.failure[:3]
        found = self._ranks.gather_values([own, failed], "orders")
        self._wishes = found[0][0]
        if self.control is not None:
            vars(self.control).update(self._wishes)
        if self.failure is None:
            self.failure = next((Failure(*other) for _, other in found if other is not None), None)

    def _miss(self, member: TrainerCallback, event: str, error: Exception) -> None:
        name = type(member).__name__
        if name not in self._missed:
            text = "the tracker %s failed in %s (%s: %s). The run goes on, and calls it again"
            _log.warning(text, name, event, type(error).__name__, error)
        self._missed[name] = self._missed.get(name, 0) + 1

    def _drop(self, member: TrainerCallback, event: str, error: Exception) -> None:
        self._members.remove(member)
        said = f"{type(error).__name__}: {error}"
        self.failure = self.failure or Failure(type(member).__name__, event, said, error)

    def at(self, step: int, *, tokens: int) -> None:
        """Update the state that tells how far the run is."""
        if self.state is not None:
            self.state.global_step = step
            self.state.epoch = step / self._steps_per_epoch
            self.state.num_input_tokens_seen = tokens

    def log(self, numbers: Mapping[str, float]) -> None:
        """Pass numbers of the step to the callbacks that log."""
        logs = dict(numbers)
        if self.state is not None:
            logs["epoch"] = self.state.epoch
            self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=logs)

    def best(self, loss: float | None, step: int | None, checkpoint: str | None) -> None:
        """Update the state that tells which evaluation is the best."""
        if self.state is not None:
            self.state.best_metric, self.state.best_global_step = loss, step
            self.state.best_model_checkpoint = checkpoint

    def wants(self, wish: str) -> bool:
        """Return whether callbacks, of the first rank, have set a field of the control, as `should_save`."""
        return self._wishes.get(wish, False)

    def saved_state(self) -> dict[str, Any]:
        """Return the saved state of the callbacks that have a method `state`, as transformers does.

        A callback whose state is no JSON has failed: a checkpoint is written without it.
        """
        saved = {}
        for key, member in self._keeping():
            try:
                state = member.state()
                json.dumps(state, allow_nan=False)
            except Exception as error:
                self._drop(member, "state", error)
            else:
                saved[key] = state
        return saved

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `saved_state` returned; a callback that is new keeps its initial state.

        Raises:
            CallbackError: A callback does not accept its saved state.
        """
        for key, member in self._keeping():
            if key not in saved:
                continue
            try:
                restored = type(member).from_state(saved[key])
            except Exception as error:
                raise CallbackError(
                    f"the callback {type(member).__name__} failed in from_state, with what it has saved in "
                    f"the checkpoint ({type(error).__name__}: {error}); mend it, or go on without it"
                ) from error
            self._members[self._members.index(member)] = restored

    def _keeping(self) -> list[tuple[str, Any]]:
        """List the callbacks with a state by class; a second one of a class gets a number."""
        found: dict[str, Any] = {}
        for member in self._members:
            if hasattr(member, "state"):
                name = type(member).__name__
                same = sum(type(other).__name__ == name for other in found.values())
                found[f"{name} {same + 1}" if same else name] = member
        return list(found.items())


def wishes_of(values: Mapping[str, Any]) -> dict[str, bool]:
    """Return the wishes in a control as ranks tell them each other: a callback may set NumPy's bool."""
    return {name: bool(value) for name, value in values.items() if name.startswith("should_")}


def training_arguments(config: Config, num_steps: int) -> TrainingArguments:
    """Return a run's settings as the arguments of transformers' Trainer, for callbacks to read.

    Raises:
        ConfigError: accelerate is not installed.
    """
    from transformers import TrainingArguments

    optim, train, held_out = config.optim, config.train, config.eval
    try:
        with _as_one_process():
            arguments = TrainingArguments(
                output_dir=config.out,
                per_device_train_batch_size=train.micro_batch_size,
                per_device_eval_batch_size=train.micro_batch_size,
                gradient_accumulation_steps=train.grad_accumulation,
                learning_rate=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                adam_epsilon=optim.eps,
                max_grad_norm=optim.max_grad_norm or 0.0,
                max_steps=num_steps,
                lr_scheduler_type=optim.schedule,
                lr_scheduler_kwargs=dict(optim.schedule_args),
                warmup_steps=optim.warmup_steps,
                logging_steps=config.log.every,
                save_total_limit=config.checkpoint.keep_last,
                seed=train.seed,
                data_seed=config.data_seed,
                report_to="none",
                use_cpu=True,  # the engine has the device
            )
    except ImportError as error:
        raise ConfigError(
            "callbacks and log.to need accelerate, which is not installed; pip install accelerate"
        ) from error
    # They are set behind the checks, which assume that Trainer does not keep the best checkpoint.
    arguments.run_name = config.out
    arguments.eval_strategy = "steps"
    arguments.eval_steps = held_out.every if isinstance(held_out.every, int) else None
    arguments.load_best_model_at_end = held_out.keep_best
    arguments.metric_for_best_model = f"eval_{held_out.metric}_loss" if held_out.metric else "eval_loss"
    arguments.greater_is_better = False
    return arguments


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Let accelerate make its state as for one process: for ranks it would change the number of threads."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would warn that there are ranks of which it has not been told
    names = [name for name in ("WORLD_SIZE", *OF_RANK) if name in os.environ]
    told = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(told)
        logger.setLevel(level)
