"""The engine: attach to a Hugging Face model, run steps, detach.

The model keeps its own forward, and its parameters become views of the host's working plane. How its calls
come in here is `ModelForward`'s; what can be changed between two steps is in an `Arrangement`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.config.choice import Choice
from megatrain.config.optimizers import adamw
from megatrain.config.runs import Runs, in_order, num_places
from megatrain.errors import ConfigError, DataError, ModelError
from megatrain.model.sequence.rows import cut_rows
from megatrain.model.shares import count_targets
from megatrain.store.state import HostState
from megatrain.stream import choice_checks
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.passed import Passed
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.attached import Binding
from megatrain.stream.forward.attention import chosen_kernels, repeating
from megatrain.stream.forward.compiled import Compiler
from megatrain.stream.forward.expert_loads import ExpertLoads
from megatrain.stream.forward.model_forward import ModelForward
from megatrain.stream.lanes import Lanes
from megatrain.stream.memory import room_for_activations
from megatrain.stream.meter import StepMeter
from megatrain.stream.optimizer import StepHooks, StreamedOptimizer
from megatrain.stream.parameter_groups import Grouping
from megatrain.stream.report import StepReport
from megatrain.stream.steps import PassBefore, Steps
from megatrain.stream.together import Together

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


class Engine:
    """Streams the blocks of one model; made by `attach`."""

    def __init__(
        self,
        model: PreTrainedModel,
        binding: Binding,
        lanes: Lanes,
        choice: Choice,
        *,
        micro_batch_size: int | None = None,
        compiler: Compiler | None = None,
        deterministic: bool = False,
    ) -> None:
        """Allocate device memory and override the forwards; the host state is in `binding`."""
        self.model = model
        self.host: HostState = binding.host
        self.lanes = lanes
        room = room_for_activations(binding, choice)
        choice = choice_checks.as_placed(choice, self.host)
        self.arrangement = Arrangement(model, binding, lanes, choice, activation_bytes=room)
        """The parts that stream the model."""
        self.counts = self.arrangement.counts
        """What has been moved since attach."""
        self.meter = StepMeter(self.arrangement)
        """Measures every step: what `last_step` reports."""
        self.compiler = compiler
        self._settings = ExitStack()
        self._names = [name for name, _ in model.named_parameters()]
        self._rows = self._settings.enter_context(
            binding.rows_shared(model, partial(self.counts.add, "swapped_bytes"))
        )
        """The rows of a step that ranks share out; None: each has whole ones."""
        self._model_forward = ModelForward(
            model,
            self.arrangement,
            self.meter,
            self._rows,
            head_chunk_tokens=choice.head_chunk_tokens,
            micro_batch_size=micro_batch_size,
        )
        self._steps = Steps(model, self._model_forward, self.arrangement, self.meter, self._rows)
        self.together = Together(self._steps, self.arrangement, self.require_attached)
        """Runs passes without gradients, many at a time."""
        self.optimizer: StreamedOptimizer | None = None
        """What `make_optimizer` or `adamw` has made; None: nothing yet."""
        self._model_forward.override(self.compiler, self.sync, StreamedOptimizer)
        self._settings.enter_context(chosen_kernels(model, lanes.device, repeats=deterministic))
        model.__dict__["_megatrain_engine"] = self

    # -- how it is arranged ---------------------------------------------------------------------------------

    @property
    def choice(self) -> Choice:
        """The choice in force, in which nothing is open; `reconfigure` changes it."""
        return self.arrangement.choice

    @property
    def executor(self) -> Executor:
        """What moves the bytes."""
        return self.arrangement.executor

    def reconfigure(self, choice: Choice) -> None:
        """Go on in another way from the next step on; no bit of any result changes.

        Call it between two steps: after `opt.step()`, before the next forward. It waits for the updates that
        are still running, and takes as long as the state of resident layers takes to come home and back.

        Args:
            choice: All that is wanted; `dataclasses.replace(engine.choice, num_slots=3)` changes one thing.
                What of the state is on drives stays there.

        Raises:
            ConfigError: A step is going on, or this engine cannot change to that.
            CapacityError: The device does not hold it; nothing was changed.
        """
        self.require_attached()
        arrangement, rounds = self.arrangement, self.arrangement.rounds
        choice = choice_checks.changed(choice, self.choice, len(arrangement.binding.blocks))
        rounds.recover()
        if self._model_forward.is_open or rounds.is_open or arrangement.gradients.blocks:
            raise ConfigError(
                "engine.reconfigure is for the time between two steps: finish the backward, then call "
                "opt.step() or opt.zero_grad()"
            )
        choice_checks.check_change(choice, arrangement, compiles=self.compiler is not None)
        if self.optimizer is not None:
            choice_checks.check_updates(choice.updates, self.optimizer.max_grad_norm)
        self.meter.settle()
        self.settle()  # and not `sync`, which would read weights on drives into RAM
        self.lanes.drain()
        arrangement.change(choice, self._take_part)
        self.together.planned_tokens = 0
        _log.info("the engine goes on with: %s", choice.describe())

    def _take_part(self) -> None:
        if self.optimizer is not None:
            self.optimizer.take_part(self.executor)
            self._make_room()

    def _make_room(self) -> None:
        """Allocate what gradients of the planned step need: then the first step waits for no page-locking."""
        batch = self.arrangement.binding.job.batch
        if batch is not None:
            self.arrangement.rounds.make_room(self.choice.rounds(batch.num_micro_batches))

    def count_experts(self) -> ExpertLoads:
        """Count from now on how many tokens go to each expert of the model, if it has any.

        Returns:
            The counts, which `take()` reads; it waits for the device, so call it where the loss is read.
        """
        return ExpertLoads(self.arrangement.layers)

    # -- the step -------------------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[Mapping[str, Any]], *, seeds: Sequence[int] | None = None
    ) -> Tensor:
        """Run a step's micro-batches forward and backward, from zero gradients.

        Args:
            micro_batches: Keyword arguments of the model's forward, `labels` included; one after the other.
                Of several ranks each is given those that `parts` says. Ranks that share out rows are given
                the same ones, whole.
            seeds: The seeds of torch's generators, one per micro-batch, each set before it; None: the
                generators go on.

        Returns:
            0-dim detached tensor: the loss, averaged over all trained tokens of the step.

        Raises:
            DataError: No labels, or not one token to train on.
            ConfigError: No micro-batch, or not one seed per micro-batch.
        """
        self.require_attached()
        if isinstance(micro_batches, Mapping):
            raise ConfigError("forward_backward takes a list of micro-batches; put the one batch into a list")
        batches, rows, binding = list(micro_batches), self._rows, self.arrangement.binding
        if not batches:
            raise ConfigError("forward_backward got no micro-batch; pass a list of at least one")
        counts = [count_targets(batch) for batch in batches]
        if rows is not None:
            batches = [cut_rows(batch, rows) for batch in batches]
            counts = [count_targets(batch) for batch in batches]
        ranks, own, sequence = binding.job.ranks, sum(counts), binding.job.sequence
        total, number = torch.stack(ranks.gather(torch.tensor([own, len(batches)]))).sum(0).tolist()
        if total == 0:
            raise DataError("the step has no token to train on: every label is -100; check the data's labels")
        head = self._model_forward.head

        def loss_of(batch: Mapping[str, Any], count: int) -> Tensor:
            share = head.share_of(batch, count, total=total, num_micro_batches=number // sequence)
            with head.over(share):
                return share.scaled(self.model(**{**batch, "return_dict": True}).loss)

        calls = [partial(loss_of, batch, count) for batch, count in zip(batches, counts, strict=True)]
        with nullcontext() if rows is None else rows.active():
            losses = self._steps.run(calls, seeds, own, has_plain_loss=True)
        found = [list(each) for each in ranks.gather(torch.stack(losses))]
        parts = self.parts(len(losses) * len(found) // sequence)
        return reduce(torch.add, in_order(parts, found, sequence))

    def parts(self, count: int) -> list[list[int]]:
        """Return by rank which of a step's `count` micro-batches it is given, by their numbers.

        Raises:
            ConfigError: The micro-batches cannot be cut into the step's runs.
        """
        binding = self.arrangement.binding
        size = binding.job.ranks.size
        runs = Runs.of(binding.job.runs.number * num_places(size, binding.job.sequence), count)
        return runs.parts(self.choice.lockstep, size, binding.job.sequence)

    def run_losses(
        self,
        losses: Sequence[Callable[[], Tensor]],
        *,
        seeds: Sequence[int] | None = None,
        only_loss: bool = False,
        before: Sequence[PassBefore] = (),
    ) -> list[Tensor]:
        """Run a step as `forward_backward` does, for any loss: DPO's, label smoothing, one of yours.

        Nothing is scaled: gradients add up, so each loss is divided already by what the step averages over.

        Args:
            losses: The functions, one per micro-batch, that call the model, once or several times, with
                gradients or without, and return a 0-dim tensor. Those of a round take turns at every layer.
            seeds: The seeds of the micro-batches, as in `forward_backward`.
            only_loss: A claim that the losses use the model's own `loss` and no logits: its head may run in
                chunks of tokens.
            before: Passes without gradients before the losses of each round (`StepBatch.num_passes_before`).

        Returns:
            The losses, detached, in order.

        Raises:
            ConfigError: `Steps.run` refuses the step.
        """
        self.require_attached()
        return self._steps.run(losses, seeds, only_loss=only_loss, before=before)

    def passed(self) -> Passed | None:
        """Return how far the newest step of this engine has come, while another thread runs it.

        None: no step of known micro-batches has begun. Nobody waits, and no bit depends on it.
        """
        return self.arrangement.rounds.passed()

    def adopt_forward(self) -> None:
        """Let calls come in through the forward that was put on the model after `attach`, as TRL does."""
        self.require_attached()
        self._model_forward.adopt_forward()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) lazily: fp32 host tensors, valid until `opt.step()`.

        Names are those of `model.named_parameters()`. A parameter without a gradient in this step is left
        out.

        Raises:
            ConfigError: The gradients are used up already, with updates=immediate.
            ModelError: A gradient went past the engine into `parameter.grad`.
        """
        return self.arrangement.named_gradients(self._names)

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, master) lazily for every parameter, frozen ones too: new fp32 host tensors."""
        self.settle()
        yield from self.host.masters(self._names)

    def adamw(
        self,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        **options: Any,
    ) -> StreamedOptimizer:
        """Make AdamW, as `make_optimizer` does.

        Args:
            lr: The learning rate; schedulers write `param_groups[i]["lr"]`.
            betas: The decays of the two moments.
            eps: The number that is added to the root of the second moment.
            weight_decay: The decoupled decay of all parameters but those of `no_decay`.
            **options: The other arguments of `make_optimizer`.
        """
        own: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return self.make_optimizer(adamw.FP32.name, **own, **options)

    def make_optimizer(
        self,
        name: str | None = None,
        *,
        max_grad_norm: float | None = 1.0,
        no_decay: Iterable[str] | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
        updates: str | None = None,
        state: str | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> StreamedOptimizer:
        """Make the optimizer of all trained parameters; its state is allocated here.

        Args:
            name: The name of the optimizer, such as `adamw`. None: the one that `attach` was told.
            max_grad_norm: The global norm to which gradients are clipped; None: no clipping.
            no_decay: Patterns (`fnmatch`) of parameter names without decay. None: biases and parameters of
                fewer than two dimensions, which is where norms are. An empty list: every parameter decays.
            groups: The groups of parameters as torch's optimizers take them, with settings of their own;
                `params` may be patterns of names. What is in none is not updated. None: all is, as above.
            updates: The moment at which a block is updated: `deferred` (in the background, from the end of
                the backward until the next step's forward needs it), `immediate` (as soon as its gradient is
                complete, which rules out clipping and skipping), or `serial` (all before `opt.step()`
                returns). The numbers are the same, bit for bit. None: as the choice says that was attached
                with, or else `deferred`.
            state: The format in which its state is kept. AdamW's is `fp32`, 8 bytes per parameter; or, not
                exact, `bf16`, 4, or `int8`, 2.03. None: `optimizer_state` of `attach`, beyond which it cannot
                go.
            seed: The seed of stochastic rounding, where a format has it.
            **settings: The learning rate `lr`, which schedulers change in `param_groups`, the decoupled
                `weight_decay`, and the optimizer's own settings.

        Raises:
            ConfigError: A setting out of range, clipping with `immediate`, a second optimizer, or a state for
                which no memory was planned.
            ModelError: A parameter is trained but was not there, or was frozen, when the engine was attached.
        """
        if self.optimizer is not None:
            raise ConfigError("the engine has an optimizer already (engine.optimizer); detach() ends it")
        arrangement, compiles = self.arrangement, self.compiler is not None
        kind = choice_checks.choose_optimizer(arrangement, name, state)
        choice_checks.choose_updates(arrangement, updates, max_grad_norm=max_grad_norm, compiles=compiles)
        check, stepped = self._check_step, self.meter.stepped
        hooks = StepHooks(check=check, stepped=stepped, drop=self.zero_grad, fail=self._steps.drop)
        self.optimizer = StreamedOptimizer(
            self.executor,
            dict(self.model.named_parameters()),
            hooks,
            kind,
            settings,
            max_grad_norm=max_grad_norm,
            grouping=Grouping(no_decay, groups),
            seed=seed,
        )
        self._make_room()
        return self.optimizer

    def require_attached(self) -> None:
        """Raise ModelError after detach, and TornStateError after an update that failed."""
        if self.model.__dict__.get("_megatrain_engine") is not self:
            raise ModelError("the engine was detached from its model; call megatrain.attach again")
        self.arrangement.integrity.check()

    def _check_step(self) -> None:
        self.require_attached()
        self.arrangement.rounds.recover()
        self.arrangement.binding.check_gradients()

    def repeating(self) -> AbstractContextManager[None]:
        """Let steps inside give the same bits in every run; see `attach(deterministic=True)`."""
        return repeating(self.model, self.arrangement.lanes.device)

    def zero_grad(self) -> None:
        """Drop the gradients gathered since the last step; those that wait for their update are not yours.

        Raises:
            ConfigError: The gradients are used up already, with updates=immediate.
        """
        self._steps.zero_grad()

    def sync(self) -> None:
        """Wait for every update, and make the parameters whole: call it before any read of weights.

        All ranks call it; who writes to parameters then waits for all.
        Updates of the `deferred` schedule run in the background until the next step's copies need them.
        Weights that live on drives are read into RAM, until the next `opt.step()`.

        Raises:
            CapacityError: There is no room for them.
        """
        self.settle()
        self.arrangement.guard.wait_for(range(len(self.host.layouts)))
        self.host.weights.bring()

    def settle(self) -> None:
        """Wait for every update, all ranks together: `host.borrow` then lends what the last step has left."""
        self.arrangement.settle()

    def commit(
        self,
        step: int,
        meta: Mapping[str, Any],
        *,
        finish: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Make the state after the last `opt.step()` what a crash leaves on the drives; returns at once.

        It is done in the background, before the next step writes anything. What lives in RAM is written to
        the drives for it: 12 bytes per parameter with AdamW, or 2 of blocks whose other state is there.

        Args:
            step: The number of the step.
            meta: The values that are kept with it, in plain JSON, as they are now.
            finish: The function that is called when the step's updates are done, and returns what to add to
                `meta`.

        Raises:
            ConfigError: No state is on drives.
        """
        if not self.host.has_drives:
            raise ConfigError("engine.commit needs state on drives; attach with tiers, or save a checkpoint")
        self.executor.commit(step, meta, finish)

    def weights_changed(self) -> None:
        """Take note, on every rank, that a node's first one has written to the host state: copies are old."""
        self.arrangement.integrity.check()
        self.host.weights.take()
        self.host.mark_changed()
        self.host.planes.on_write(None)
        self.executor.invalidate()
        self.executor.states.forget()

    # -- numbers --------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes of all planes of state on the host."""
        return self.host.host_bytes

    @property
    def device_bytes_peak(self) -> int:
        """Most bytes on the device so far.

        On an accelerator all that torch allocated; elsewhere slots, resident blocks and gradient buffers.
        """
        return self.lanes.peak_bytes

    @property
    def last_step(self) -> StepReport:
        """Where the time of the newest complete step went; see `StepReport` for what counts when.

        Read it after `opt.step()`, and on an accelerator after the step's loss or `grad_norm`: until then the
        device is still at work. The device is not waited for, but the first reading measures `matmul_peak`.

        Raises:
            ConfigError: No step is complete.
        """
        return self.meter.report()

    def detach(self) -> None:
        """Give the model back: its parameters keep their values, in the working dtype, in host memory.

        What is left beside them is the rest of fp32 masters, with which a later `attach` in bf16 goes on, but
        for weights that were changed meanwhile; of state on drives, and of the optimizer's, nothing is left.

        Raises:
            CapacityError: State is on the device alone, or weights are kept in codes, and RAM does not hold
                what they become; nothing was changed.
        """
        if self.model.__dict__.get("_megatrain_engine") is not self:
            return
        self.settle()
        self.arrangement.binding.require_room_for_values()
        self.executor.states.bring_home(optimizer=False)
        self.sync()
        self._model_forward.remove()
        self.close(removes=True)
        self.model._megatrain_engine = None
        if self.host.has_drives:
            self.model.__dict__.pop("_megatrain_host", None)
        else:
            self.arrangement.binding.give_back(self.model)

    def close(self, *, removes: bool = False) -> None:
        """Finish all work, let go of threads and drives, and remove what is there if nobody will go on."""
        try:
            self.lanes.close()
        finally:
            self._settings.close()
            for scratch in filter(None, (self.arrangement.scratch, self.arrangement.parking)):
                scratch.close()
            store = self.host.on_drives.store
            (store.remove if removes else store.close)()
