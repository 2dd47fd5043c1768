"""What makes a trainer of Hugging Face stream its model: the parts that each of our trainers puts before it.

A trainer keeps its loop, its data, its `compute_loss`, its callbacks and its logs. What changes: the model is
attached to an engine; the micro-batches of a step run together, when the first is asked for; the optimizer is
the engine's AdamW, which clips and knows the norm; and a checkpoint holds the engine's exact state.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import has_length

from megatrain.config.read_choice import as_values
from megatrain.errors import CheckpointError, ConfigError
from megatrain.hf.ahead import Turns, instead
from megatrain.hf.arguments import MegatrainArguments, mapped
from megatrain.hf.control import FirstDecides
from megatrain.hf.evaluation import Predictions
from megatrain.hf.given import require_given
from megatrain.hf.precision import precision_of
from megatrain.hf.ranks import join
from megatrain.hf.saved import read_weights
from megatrain.hf.steps import StepGroup
from megatrain.hf.traces import Traces
from megatrain.model.weights.skeleton import read_config
from megatrain.stream.attach import attach
from megatrain.stream.engine import Engine
from megatrain.stream.load import load
from megatrain.stream.optimizer import StreamedAdamW
from megatrain.stream.steps import PassBefore
from megatrain.train.ranks import require_same
from megatrain.train.resume.state import has_state, lend_state, read_state, remove_state, write_state

_log = logging.getLogger(__name__)

_SHARDS = "megatrain.json"
"""File of a checkpoint that says into how many runs its steps were cut."""

_OF_PROCESS = ("local_rank", "logging_dir", "run_name", "log_level", "log_level_replica")
"""Arguments that may be each rank's own."""

_Base: Any = object
"""So that calls of the plain trainer's methods, which stand behind these, are not taken for mistakes."""


class Streaming(_Base):
    """Stands before `transformers.Trainer`, or a subclass of it, in the list of a class's bases."""

    engine: Engine
    """What the model is attached to; `trainer.engine.detach()` gives an ordinary model back."""
    optimizer: Any
    """The engine's, which accelerate wraps."""
    _num_passes_before = 0
    """How many `_passes_before` lists, for the plan."""

    def __init__(self, *args: Any, megatrain: MegatrainArguments | None = None, **kwargs: Any) -> None:
        """Make the trainer, and attach its model.

        Args:
            *args: As of the plain trainer.
            megatrain: How the model streams; None: all is planned.
            **kwargs: As of the plain trainer. `model` may be a path or a hub id, which is loaded straight
                into host memory, a model on the CPU, or one that is attached already; with the latter,
                `optimizers` may hold its `engine.adamw(...)`.

        Raises:
            ConfigError: What the arguments ask for cannot be done; nothing was loaded.
        """
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        self._megatrain = megatrain or MegatrainArguments()
        self._group = StepGroup([])
        args = require_given(given)
        self._ranks = join(args)
        self._control = None if self._ranks is None else FirstDecides(self._ranks, self)
        self._args = given["args"] = mapped(args, self._ranks)
        self._require_same()
        model = given["model"]
        self._precision = precision_of(self._args, model)
        if isinstance(model, (str, Path)):
            given["model"] = self._load(str(model))
        super().__init__(**given)
        self._stream()

    # -- the model ------------------------------------------------------------------------------------------

    def _load(self, path: str) -> PreTrainedModel:
        context = _context_of(read_config(path))
        settings = self._megatrain.load_settings(
            self._args, context, self._precision, self._num_passes_before, self._ranks
        )
        kwargs = dict(getattr(self._args, "model_init_kwargs", None) or {})
        attention = kwargs.pop("attn_implementation", None)
        kwargs.pop("dtype", None)  # `precision_of` has read it
        if kwargs:
            raise ConfigError(
                f"model_init_kwargs has {', '.join(sorted(kwargs))}, which megatrain.load does not take; "
                "pass a model in place of its path"
            )
        return load(path, self._megatrain.choice, attn_implementation=attention, **settings).train()

    def _stream(self) -> None:
        """Attach the model, if it is not, and let calls come in through the forward that it has now."""
        engine: Engine | None = getattr(self.model, "_megatrain_engine", None)
        if engine is None:
            context = _context_of(self.model.config)
            settings = self._megatrain.attach_settings(
                self._args, context, self._precision, self._num_passes_before, self._ranks
            )
            engine = attach(self.model, self._megatrain.choice, **settings)
        if engine.host.precision.value != self._precision:
            raise ConfigError(
                f"bf16 is {bool(self._args.bf16)} (TRL's default is True), but the model was attached "
                f"with precision={engine.host.precision.value!r}; pass the bf16 that fits it"
            )
        if self._ranks is not None and engine.arrangement.binding.ranks is not self._ranks:
            raise ConfigError(
                f"the model was attached by one process alone, and {self._ranks.size} train together; pass "
                "its path, or the model as it was before attach"
            )
        engine.adopt_forward()
        self.engine = engine
        self._turns = Turns(engine)

    @property
    def _num_runs(self) -> int:
        """Into how many runs all ranks together cut a step."""
        binding = self.engine.arrangement.binding
        return binding.runs.number * (1 if self._ranks is None else self._ranks.size)

    def _move_model_to_device(self, *_: Any, **__: Any) -> None:
        """Leave the model where it is: it streams to the device."""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # bf16 weights take the place of autocast
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    # -- a step ---------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the plain trainer does."""
        self.engine.zero_grad()
        with nullcontext() if self._control is None else self._control.training():
            done = super().train(*args, **kwargs)
        self.engine.settle()  # together: the first rank may be the only one that saves the model
        if self._ranks is not None:
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
            if self._ranks is not None:
                self._ranks.watch.doing(f"at step {self.state.global_step + 1}")
            group.run(
                self.engine,
                self.accelerator,
                lambda batch: step(model, batch, *args, **kwargs),
                seed=self.args.seed,
                number=self.state.global_step,
                num_steps=self.state.max_steps,
                only_loss=self._uses_only_loss,
                before=self._passes_before(group),
                traces=Traces(self),
            )
        return group.take()

    def _passes_before(self, group: StepGroup) -> list[PassBefore]:
        """List the passes that come before the losses of a step, which put what they find into its inputs."""
        return []

    @property
    def _uses_only_loss(self) -> bool:
        """Whether the loss is the model's own, and nothing else of its output is looked at."""
        is_plain = type(self).compute_loss is Trainer.compute_loss
        return is_plain and self.compute_loss_func is None and self.label_smoother is None

    # -- the optimizer --------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the engine's AdamW as `TrainingArguments` describe it, unless it was given."""
        if self.optimizer is None:
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
        self._streamed.moments_are_kept_beside = True
        return self.optimizer

    @property
    def _streamed(self) -> StreamedAdamW:
        """The engine's optimizer itself.

        Raises:
            ConfigError: Somebody has put another in its place.
        """
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, StreamedAdamW):
            raise ConfigError(
                f"the trainer's optimizer is {type(optimizer).__name__}; a streamed model is trained by "
                "AdamW of its engine: pass optimizers=(engine.adamw(...), None), or leave it out"
            )
        return optimizer

    def _clip_grad_norm(self, model: Any) -> None:
        """Do nothing: the optimizer clips, and knows the norm when its step has begun."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Do nothing: as `_clip_grad_norm`."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self._control is None else self._control.together():
            stats = self._streamed.last_stats
            if stats is not None and self.control.should_log:
                grad_norm = stats.grad_norm  # waits for it, so it is read for the log alone
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # -- evaluation -----------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as the plain trainer does, batches together; ranks each predict their part of them."""
        given = description, prediction_loss_only, ignore_keys, metric_key_prefix
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        ranks, predictions = self._ranks, Predictions(self, loss_only, ignore_keys)
        if ranks is None or not has_length(dataloader):
            ahead = predictions.ahead(dataloader)
            with instead(self, "prediction_step", lambda *_, **__: ahead.take()):
                return super().evaluation_loop(ahead, *given)
        with ranks.watch.moving(f"evaluating step {self.state.global_step}"):
            found = predictions.shared(ranks, dataloader)
            with instead(self, "prediction_step", lambda *_, **__: next(found)):
                return super().evaluation_loop(dataloader, *given)

    def run_together(
        self, batches: Sequence[Any], call: Callable[[int, Any], Any], traces: Traces
    ) -> list[Any]:
        """Run a call without gradients for each batch, together, after the passes that come before them.

        Args:
            batches: As the trainer reads them.
            call: Is given the place of a batch, and its inputs with what passes before it have found.
            traces: Takes note of the calls.
        """
        group = StepGroup(batches)
        for each in self._passes_before(group):
            with each.around():
                self._turns.run(each.calls)
        calls = [lambda place=place: call(place, group.inputs[place]) for place in range(len(batches))]
        return self._turns.run(calls, traces)

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as the plain trainer does: rank 0 reads what all ranks have brought home."""
        self.engine.settle()
        super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        ranks = self._ranks
        if ranks is None:
            super()._save_checkpoint(*args, **kwargs)
            return
        with ranks.watch.moving(f"saving step {self.state.global_step}"):
            super()._save_checkpoint(*args, **kwargs)
        # the others may have looked for the best one before it was there
        self.state.best_model_checkpoint = ranks.tell(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        ranks, directory = self._ranks, Path(output_dir)
        if ranks is None or ranks.rank == 0:
            remove_state(directory)  # of an earlier run in this directory, which Trainer writes over
            write_state(self.engine, directory)
            (directory / _SHARDS).write_text(json.dumps({"shards": self._num_runs}))
        elif ranks.num_nodes > 1:
            lend_state(self.engine)
        super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # that of one process, which all ranks have
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights into host memory, tensor by tensor, or those of the adapter that is trained."""
        self.engine.sync()
        with self._in_turn() as reads:
            read_weights(self.model, resume_from_checkpoint, self.engine.host, reads=reads)
            self.engine.weights_changed()

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint)
        if not has_state(path) and (path / "optimizer.pt").exists():
            raise CheckpointError(
                f"{checkpoint} was saved by a plain trainer, whose optimizer state is of another form; begin "
                "a new run from its weights, or resume it with the plain trainer"
            )
        if has_state(path):
            self._warn_of_shards(path)
            self.engine.settle()
            with self._in_turn() as reads:
                if reads:
                    read_state(self.engine.host, path)
                self.engine.weights_changed()
        super()._load_optimizer_and_scheduler(checkpoint)

    def _warn_of_shards(self, checkpoint: Path) -> None:
        """Say that a run goes on in other sums than it began with."""
        place = checkpoint / _SHARDS
        saved = json.loads(place.read_text())["shards"] if place.exists() else 1
        if saved != self._num_runs:
            _log.warning(
                "%s was trained with %s shards, and goes on with %s: sums will round otherwise; "
                "MegatrainArguments(shards=%s) goes on to the same bits",
                checkpoint,
                saved,
                self._num_runs,
                saved,
            )

    # -- ranks ----------------------------------------------------------------------------------------------

    def _require_same(self) -> None:
        """Refuse to train with ranks whose scripts say something else.

        Raises:
            ConfigError: One does.
        """
        if self._ranks is None:
            return
        own = {field.name: str(getattr(self._megatrain, field.name)) for field in fields(self._megatrain)}
        own |= {"choice": str(as_values(self._megatrain.choice)), "trainer": type(self).__name__}
        said = {name: str(value) for name, value in self._args.to_dict().items() if name not in _OF_PROCESS}
        require_same(self._ranks, own | said, {})

    @contextmanager
    def _in_turn(self) -> Iterator[bool]:
        """Yield whether this rank writes to the state of its node; the others go on when it has."""
        ranks = self._ranks
        if ranks is not None:
            ranks.meet("orders")
        yield ranks is None or ranks.local_rank == 0
        if ranks is not None:
            ranks.meet("orders")


def _context_of(config: Any) -> int | None:
    return getattr(config.get_text_config(), "max_position_embeddings", None)
