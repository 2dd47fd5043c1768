"""The base class that makes a trainer of Hugging Face stream its model; each of our trainers has it first.

A trainer keeps its loop, its data, its `compute_loss`, its callbacks and its logs. These change: the model is
attached to an engine; the micro-batches of a step run together, when the first is asked for; the optimizer is
the engine's AdamW, which clips and knows the norm; a checkpoint holds the exact state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import has_length

from megatrain.config.read_choice import as_values
from megatrain.errors import ConfigError
from megatrain.hf.arguments import MegatrainArguments, mapped, with_even_rows
from megatrain.hf.batches.ahead import Turns
from megatrain.hf.batches.evaluation import Predictions
from megatrain.hf.batches.metric_traces import Traces
from megatrain.hf.batches.steps import StepGroup
from megatrain.hf.control import FirstDecides, say_who_looks_at_gradients
from megatrain.hf.counting import one_by_one, require_one_by_one, what_counts
from megatrain.hf.given import require_given
from megatrain.hf.model.attached import (
    Settings,
    attached,
    engine_of,
    leave_optimizer,
    load_path,
    take_from_others,
)
from megatrain.hf.model.checkpoints import Checkpoints, save_untouched
from megatrain.hf.model.precision import precision_of
from megatrain.hf.optimizer import (
    as_streamed,
    names_optimizer,
    require_its_schedule,
    require_new,
    streamed,
)
from megatrain.hf.ranks import join
from megatrain.hf.rescue import LastStep
from megatrain.stream.engine import Engine
from megatrain.stream.optimizer import StreamedOptimizer
from megatrain.stream.steps import PassBefore
from megatrain.train.ranks import require_same

_OF_PROCESS = ("local_rank", "logging_dir", "run_name", "log_level", "log_level_replica")
"""The arguments that may be each rank's own."""

_Base: Any = object
"""The type of the base, so that calls of the plain trainer's methods are not taken for mistakes."""


class Streaming(_Base):
    """Comes before `transformers.Trainer`, or a subclass of it, in the list of a class's bases.

    Such a class may compute anything of a batch. One whose methods count micro-batches runs them one by one,
    in one process; see `megatrain.hf.counting`. `megatrain.hf.grpo` has those of TRL that generate.
    """

    engine: Engine
    """The engine of the model; `trainer.engine.detach()` gives an ordinary model back."""
    _in_order: Collection[str] = ()
    """The attributes of the plain trainer that tell one micro-batch from the next, and that this class keeps
    in order."""
    _num_passes_before = 0
    """The number of passes that `_passes_before` lists, for the plan."""

    def __init__(self, *args: Any, megatrain: MegatrainArguments | None = None, **kwargs: Any) -> None:
        """Make the trainer, and attach its model.

        Args:
            *args: The positional arguments of the plain trainer.
            megatrain: The settings by which the model streams; None plans all of them.
            **kwargs: The keyword arguments of the plain trainer. `model` may be a path or a hub id, which is
                loaded straight into host memory, a model on the CPU, or one that is attached already; with
                the latter, `optimizers` may hold its `engine.adamw(...)`.

        Raises:
            ConfigError: The arguments ask for something that cannot be done; nothing was loaded.
        """
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        self._megatrain = megatrain or MegatrainArguments()
        self._group = StepGroup([])
        self._optimizer: Any = None
        args = require_given(given)
        self._ranks = join(args)
        self._control = FirstDecides(self._ranks, self)
        self._last_step = LastStep(self, self._ranks)
        self._args = given["args"] = mapped(args, self._ranks)
        with_even_rows(given, self._megatrain)
        self._clipped = self._args.max_grad_norm
        self._require_same()
        self._counts = what_counts(type(self))
        if self._counts is not None:
            self._megatrain = one_by_one(self._megatrain, self._counts, self._ranks)
        model = given["model"]
        self._settings = Settings(
            args=self._args,
            precision=precision_of(self._args, model),
            num_passes_before=self._num_passes_before,
            ranks=self._ranks,
        )
        if isinstance(model, (str, Path)):
            given["model"] = load_path(str(model), self._megatrain, self._settings)
        elif self._megatrain.rope_scaling is not None:
            raise ConfigError(
                "MegatrainArguments has rope_scaling, and the model is made already; pass its path, or give "
                "its config the rope_parameters before it is made"
            )
        else:
            take_from_others(model, (given.get("optimizers") or (None,))[0])
        super().__init__(**given)
        self._stream()

    # -- the model ------------------------------------------------------------------------------------------

    def _stream(self) -> None:
        """Attach the model if necessary, and let calls come in through its present forward."""
        engine = attached(self.model, self._megatrain, self._settings)
        require_one_by_one(engine.choice.lockstep, self._counts)
        engine.adopt_forward()
        self.engine = engine
        self._turns = Turns(engine, are_taken=self._counts is None)
        self._checkpoints = Checkpoints(engine, self._ranks, self._num_runs)

    def _hold_model(self) -> None:
        """Take the model back if another trainer has it now, or if it was detached.

        Raises:
            ConfigError: This trainer's moments are gone with its engine.
        """
        if engine_of(self.model) is self.engine:
            return
        if self.optimizer is not None:
            raise ConfigError(
                "the model was detached from this trainer's engine, or another trainer has taken it; make a "
                "new trainer of it to go on"
            )
        take_from_others(self.model, None)
        self._stream()

    @property
    def _num_runs(self) -> int:
        """Return the number of runs into which all ranks together cut a step."""
        return self.engine.arrangement.binding.job.runs.number * self._ranks.size

    def _move_model_to_device(self, *_: Any, **__: Any) -> None:
        """Leave the model where it is, since it streams to the device."""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # bf16 weights replace autocast
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    # -- a step ---------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the plain trainer does; where an error ends it, the last whole step is saved.

        Raises:
            ConfigError: Another trainer has taken the model.
        """
        self._hold_model()
        say_who_looks_at_gradients(self.callback_handler.callbacks)
        self.engine.zero_grad()
        with self._control.training(), self._last_step.rescued():
            done = super().train(*args, **kwargs)
        self.engine.settle()  # all ranks settle, since the first one may save the model alone
        self._ranks.watch.doing("after its training", prepares=True)
        return done

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Collect the batches of a step, which will run together."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._group = StepGroup(batches, self._num_runs, self._ranks, self.engine.parts)
        return batches, num_items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return a batch's loss; the first of a step runs all of its batches, forward and backward."""
        if not self._group.expects(inputs):
            self._group = StepGroup([inputs], self._num_runs, self._ranks, self.engine.parts)
        group, step = self._group, super().training_step
        if not group.has_run:
            self._ranks.watch.doing(f"at step {self.state.global_step + 1}")
            self._last_step.begin()
            group.run(
                self,
                lambda batch: step(model, batch, *args, **kwargs),
                only_loss=self._uses_only_loss,
                before=self._passes_before(group),
            )
        return group.take()

    def _passes_before(self, group: StepGroup) -> list[PassBefore]:
        """List the passes that come before the losses of a step, which put their results into its inputs."""
        return []

    @property
    def _uses_only_loss(self) -> bool:
        """Return whether the loss is the model's own, and nothing else of its output is used."""
        is_plain = type(self).compute_loss is Trainer.compute_loss
        return is_plain and self.compute_loss_func is None and self.label_smoother is None

    # -- the optimizer --------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """Return the engine's optimizer, wrapped by accelerate; None if there is none yet."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        if "engine" in vars(self) and value is not None and streamed(value) is None:
            require_new(value)
            if leave_optimizer(self.engine):
                self._stream()
            clip, seed = self.args.max_grad_norm or None, self.args.seed
            value = as_streamed(self.engine, value, max_grad_norm=clip, seed=seed)
        if (own := streamed(value)) is not None:
            own.moments_are_kept_beside = True
        self._optimizer = value

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the engine's AdamW as `TrainingArguments` describe it, unless it was given."""
        if self.optimizer is not None:
            self.optimizer = self.optimizer  # it may have been given before there was an engine
        elif self.optimizer_cls_and_kwargs is not None or names_optimizer(super().create_optimizer):
            super().create_optimizer()
        else:
            parameters = dict(self.model.named_parameters())
            decayed = set(self.get_decay_parameter_names(self.model))
            self.optimizer = self.engine.adamw(
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                weight_decay=self.args.weight_decay,
                max_grad_norm=self.args.max_grad_norm or None,
                no_decay=[name for name in parameters if name not in decayed],
                seed=self.args.seed,
            )
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the schedule as the plain trainer does, for the engine's AdamW."""
        made = super().create_scheduler(*args, **kwargs)
        require_its_schedule(self.lr_scheduler, self.optimizer)
        return made

    @property
    def _streamed(self) -> StreamedOptimizer:
        """Return the engine's optimizer itself."""
        found = streamed(self.optimizer)
        assert found is not None
        return found

    def _clip_grad_norm(self, model: Any) -> None:
        """Make the optimizer clip by the present arguments; it knows the norm when its step has begun."""
        now = self.args.max_grad_norm
        if now != self._clipped:
            self._clipped, self._streamed.max_grad_norm = now, now or None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Return nothing, as `_clip_grad_norm` does, which is not called where nothing is clipped."""
        self._clip_grad_norm(model)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        self._last_step.note()
        with self._control.together():
            stats = self._streamed.last_stats
            if stats is not None and self.control.should_log:
                grad_norm = stats.grad_norm  # reading waits for it, so it is read for the log alone
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        self._last_step.note()

    # -- evaluation -----------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as the plain trainer does, batches together; each rank predicts its part of them."""
        given = description, prediction_loss_only, ignore_keys, metric_key_prefix
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if engine_of(self.model) is not self.engine:  # it is an ordinary model now, or another trainer's
            return super().evaluation_loop(dataloader, *given)
        ranks, predictions = self._ranks, Predictions(self, loss_only, ignore_keys)
        if ranks.size == 1 or not has_length(dataloader):  # those of one rank may stay on its device
            ahead = predictions.ahead(dataloader)
            with mock.patch.object(self, "prediction_step", ahead.take):
                return super().evaluation_loop(ahead, *given)
        with ranks.watch.moving(f"evaluating step {self.state.global_step}"):
            found = predictions.shared(ranks, dataloader)

            def take(*_: Any, **__: Any) -> Any:
                return next(found)

            with mock.patch.object(self, "prediction_step", take):
                return super().evaluation_loop(dataloader, *given)

    def run_together(
        self, batches: Sequence[Any], call: Callable[[int, Any], Any], traces: Traces
    ) -> list[Any]:
        """Run a call without gradients for each batch, together, after the passes that come before them.

        Args:
            batches: The batches as the trainer reads them.
            call: The function of a batch's place and its inputs, with the results of passes before it.
            traces: The traces, which note the calls.
        """
        group = StepGroup(batches)
        for each in self._passes_before(group):
            with each.around():
                self._turns.run(each.calls)
        calls = [lambda place=place: call(place, group.inputs[place]) for place in range(len(batches))]
        return self._turns.run(calls, traces)

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as the plain trainer does; rank 0 reads what all ranks have brought home."""
        self.engine.settle()
        super().save_model(*args, **kwargs)

    def _save(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        super()._save(output_dir, *args, **kwargs)
        if self.args.should_save:
            save_untouched(self.model, Path(output_dir or self.args.output_dir))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._ranks.watch.moving(f"saving step {self.state.global_step}"), self._last_step.saving():
            super()._save_checkpoint(*args, **kwargs)
        # The others may have looked for the best checkpoint before it was there.
        self.state.best_model_checkpoint = self._ranks.tell(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._checkpoints.write(Path(output_dir))
        super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the random state is one process's, and equal on all ranks
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._checkpoints.read_weights(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._last_step.leave()
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._checkpoints.read(Path(checkpoint))
            super()._load_optimizer_and_scheduler(checkpoint)

    # -- ranks ----------------------------------------------------------------------------------------------

    def _require_same(self) -> None:
        """Refuse to train with ranks whose scripts differ.

        Raises:
            ConfigError: A rank's script differs.
        """
        own = {field.name: str(getattr(self._megatrain, field.name)) for field in fields(self._megatrain)}
        own |= {"choice": str(as_values(self._megatrain.choice)), "trainer": type(self).__name__}
        said = {name: str(value) for name, value in self._args.to_dict().items() if name not in _OF_PROCESS}
        require_same(self._ranks, own | said, {})
