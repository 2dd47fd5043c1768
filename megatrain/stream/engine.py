"""The engine: attach to a Hugging Face model, run steps, detach.

The model keeps its own forward, and its parameters become views of the host's working plane. How its calls
come in here is `ModelForward`'s; what can be changed between two steps is in an `Arrangement`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from megatrain.config.choice import Choice, Updates, read_member
from megatrain.errors import ConfigError, DataError, ModelError
from megatrain.hardware import measure_matmul_peak
from megatrain.layout.moments import MomentFormat
from megatrain.model.blocks import group_layers
from megatrain.model.head import count_targets
from megatrain.store.drives.scratch import ScratchFiles
from megatrain.store.state import HostState, Precision
from megatrain.store.tiered import TieredState
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.arrange import (
    NO_DRIVES,
    Arrangement,
    as_placed,
    changed,
    check_choice,
    outer_of,
    planes_to_drop,
    residents_of,
)
from megatrain.stream.bind import Binding, host_planes, require_device_memory, room_for_activations
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.gradients import Gradients, Home
from megatrain.stream.execute.issuer import Counts
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.forward.attached import AttachedBlock, AttachedLayer
from megatrain.stream.forward.attention import attention_of, attention_order
from megatrain.stream.forward.compiled import Compiler
from megatrain.stream.forward.model_forward import ModelForward
from megatrain.stream.forward.rounds import Rounds
from megatrain.stream.lanes import Lanes
from megatrain.stream.meter import StepMeter, recomputed_forwards
from megatrain.stream.optimizer import StepHooks, StreamedAdamW, check_moments, check_updates
from megatrain.stream.report import StepReport

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
        compiles: bool = False,
    ) -> None:
        """Allocate device memory and shadow the forwards; the host state is in `binding`."""
        self.model = model
        self.host: HostState = binding.host
        self.lanes = lanes
        self._binding = binding
        blocks = binding.blocks
        self._tiered = self.host if isinstance(self.host, TieredState) else None
        self._drives = None if self._tiered is None else StateOnDrives(lanes, self._tiered)
        owners = {
            entry.name: (index, number)
            for index, layout in enumerate(self.host.layouts)
            for number, entry in enumerate(layout.entries)
        }
        attached = [
            AttachedBlock(index, block, layout, owners)
            for index, (block, layout) in enumerate(zip(blocks, self.host.layouts, strict=True))
        ]
        self._outer = [attached[index] for index in outer_of(blocks)]
        self._layers = [AttachedLayer([attached[i] for i in indices]) for indices in group_layers(blocks)]
        planes = host_planes(
            self.host.layouts,
            self.host.precision,
            accumulates=True,
            on_device=residents_of(choice, blocks) if choice.gradients == "device" else None,
            moments=binding.moments,
        )
        offloaded = OffloadedActivations(lanes, room_for_activations(self.host, planes))
        self._scratch = (
            None if self._tiered is None else ScratchFiles(self._tiered.on_drives.store.directories)
        )
        if self._tiered is not None:
            choice = as_placed(choice, self._tiered.on_drives.placement, len(blocks))
        self.arrangement = self._arrange(choice, offloaded, Counts())
        self.micro_batch_size = micro_batch_size
        """Rows of a micro-batch into which a larger batch of `model(**batch)` is split; None: never."""
        self.compiler = Compiler() if compiles else None
        self._settings = ExitStack()
        self._settings.enter_context(attention_order(attention_of(lanes.device)))
        self._names = [name for name, _ in model.named_parameters()]
        self._model_forward = ModelForward(self, binding, self._layers, self._outer, choice.head_chunk_tokens)
        self._optimizer: StreamedAdamW | None = None
        self.meter = StepMeter(self)
        """Measures every step: what `last_step` reports."""
        self._model_forward.override(self.compiler)
        model.__dict__["_megatrain_engine"] = self

    def _arrange(self, choice: Choice, offloaded: OffloadedActivations, counts: Counts) -> Arrangement:
        offloaded.use(self._scratch if choice.boundaries == "nvme" else None)
        return Arrangement(
            self.lanes,
            self._binding,
            choice,
            self._layers,
            self._outer,
            offloaded=offloaded,
            counts=counts,
            drives=self._drives,
        )

    # -- how it is arranged ---------------------------------------------------------------------------------

    @property
    def choice(self) -> Choice:
        """The choice in force, in which nothing is open; `reconfigure` changes it."""
        return self.arrangement.choice

    @property
    def residents(self) -> frozenset[int]:
        """Blocks of which everything is on the device."""
        return self.arrangement.residents

    @property
    def moments(self) -> MomentFormat:
        """For which format of the optimizer's state memory was planned."""
        return self._binding.moments

    @property
    def gradients(self) -> Gradients:
        """The gradients of the step."""
        return self.arrangement.gradients

    @property
    def executor(self) -> Executor:
        """What moves the bytes."""
        return self.arrangement.executor

    @property
    def slots(self) -> Slots:
        """The device memory of weights."""
        return self.arrangement.slots

    @property
    def rounds(self) -> Rounds:
        """What passes of the model are expected."""
        return self.arrangement.rounds

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
        choice = changed(choice, self.choice)
        self._refuse_change(choice)
        self.meter.settle()
        old = self.arrangement
        self.settle()  # and not `sync`, which would read weights on drives into RAM
        self.lanes.drain()
        old.release()
        held, offloaded = self.lanes.device_bytes, old.offloaded
        offloaded.trim()
        try:
            self._take(choice, offloaded)
        except BaseException:
            self.lanes.device_bytes = held
            self._take(old.choice, offloaded)
            raise
        _log.info("the engine goes on with: %s", choice.describe())

    def _refuse_change(self, choice: Choice) -> None:
        blocks = self._binding.blocks
        check_choice(choice, blocks, compiles=self.compiler is not None)
        residents = residents_of(choice, blocks)
        if self.rounds.is_broken:
            self.rounds.drop()
        if self._model_forward.is_open or self.rounds.is_open or self.gradients.blocks:
            raise ConfigError(
                "engine.reconfigure is for the time between two steps: finish the backward, then call "
                "opt.step() or opt.zero_grad()"
            )
        if residents and self._tiered is not None:
            raise ConfigError(
                "blocks cannot become resident: the state is on drives, from where none goes to the device "
                "for good; use resident_layers=0 and outer_resident=False"
            )
        if choice.boundaries == "nvme" and self._scratch is None:
            raise ConfigError(NO_DRIVES)
        if self._optimizer is not None:
            check_updates(choice.updates, self._optimizer.max_grad_norm)
        held = self.lanes.device_bytes
        require_device_memory(
            blocks, self.host.layouts, self.lanes, choice, residents, moments=self.moments, held=held
        )

    def _take(self, choice: Choice, offloaded: OffloadedActivations) -> None:
        """Let a new choice take effect; the device memory of the old one is free."""
        for plane in planes_to_drop(self.choice, choice):
            self.lanes.unlock(self.host.arena(plane))
            self.host.release(plane)
        self.arrangement = self._arrange(choice, offloaded, self.executor.counts)
        if self._optimizer is not None:
            self._optimizer.take_part(self.executor)

    # -- the step -------------------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[Mapping[str, Any]], *, seeds: Sequence[int] | None = None
    ) -> Tensor:
        """Run a step's micro-batches forward and backward, from zero gradients.

        Args:
            micro_batches: Keyword arguments of the model's forward, `labels` included; one after the other.
            seeds: One seed of torch's generators per micro-batch, set before it; None: the generators go on.

        Returns:
            0-dim detached tensor: the loss, averaged over all trained tokens of the step.

        Raises:
            DataError: No labels, or not one token to train on.
            ConfigError: No micro-batch, or not one seed per micro-batch.
        """
        self.require_attached()
        if isinstance(micro_batches, Mapping):
            raise ConfigError("forward_backward takes a list of micro-batches; put the one batch into a list")
        batches = list(micro_batches)
        if not batches:
            raise ConfigError("forward_backward got no micro-batch; pass a list of at least one")
        if seeds is not None and len(seeds) != len(batches):
            raise ConfigError(f"forward_backward got {len(seeds)} seeds for {len(batches)} micro-batches")
        counts = [count_targets(batch) for batch in batches]
        if sum(counts) == 0:
            raise DataError("the step has no token to train on: every label is -100; check the data's labels")
        if seeds is None and self.choice.lockstep > 1 and len(batches) > 1:
            seeds = torch.randint(2**62, (len(batches),)).tolist()
        self.zero_grad()
        self.meter.begin(sum(counts))
        try:
            return self._model_forward.run_step(batches, counts, seeds)
        except CheckpointError as error:
            self._recover()
            raise ModelError(
                f"{type(self.model).__name__} has a block that does not compute the same twice (it keeps "
                "state between calls), so its activations cannot be recomputed; use activations='keep'"
            ) from error
        except BaseException:
            self._recover()
            raise

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) lazily: fp32 host tensors, valid until `opt.step()`.

        Names are those of `model.named_parameters()`. A parameter without a gradient in this step is left
        out.
        """
        if any(home is Home.UPDATED for home in self.gradients.homes):
            raise ConfigError(
                "with updates=immediate, gradients are used up as soon as they are complete; use deferred to "
                "read them"
            )
        self.executor.wait_for_gradients()
        return self.gradients.named(self._names)

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
        max_grad_norm: float | None = 1.0,
        no_decay: Iterable[str] | None = None,
        updates: str | None = None,
        state: str | None = None,
        seed: int = 0,
    ) -> StreamedAdamW:
        """Make the optimizer of all trained parameters; its state is allocated here.

        Args:
            lr: Learning rate; schedulers write `param_groups[i]["lr"]`.
            betas: Decay of the two moments.
            eps: Added to the root of the second moment.
            weight_decay: Decoupled decay of all parameters but `no_decay`.
            max_grad_norm: Clip the global norm to this; None: no clipping.
            no_decay: Patterns (`fnmatch`) of parameter names without decay. None: biases and parameters of
                fewer than two dimensions, which is where norms are. An empty list: every parameter decays.
            updates: When a block is updated: `deferred` (in the background, from the end of the backward
                until the next step's forward needs it), `immediate` (as soon as its gradient is complete,
                which rules out clipping and skipping), or `serial` (all before `opt.step()` returns). The
                numbers are the same, bit for bit. None: as the choice says that was attached with, or else
                `deferred`.
            state: What the moments are kept in: `fp32`, 8 bytes per parameter; or, not exact, `bf16`, 4, or
                `int8`, 2.03. None: `optimizer_state` of `attach`, beyond which it cannot go.
            seed: Of the stochastic rounding of `bf16` and `int8`.

        Raises:
            ConfigError: A hyper-parameter out of range, clipping with `immediate`, a second optimizer, or a
                state for which no memory was planned.
            ModelError: A parameter is trained but was not there, or was frozen, when the engine was attached.
        """
        if self._optimizer is not None:
            raise ConfigError("the engine has an optimizer already; one engine trains with one optimizer")
        updates = read_member(Updates, updates or self.updates, "updates").value
        check_updates(updates, max_grad_norm)
        choice = replace(self.choice, updates=updates)
        check_choice(choice, self._binding.blocks, compiles=self.compiler is not None)
        moments = self.moments if state is None else MomentFormat.read(state)
        check_moments(self.executor, moments, self.moments)
        self.arrangement.choice = choice
        self.executor.spec = replace(self.executor.spec, updates=updates)
        self._optimizer = StreamedAdamW(
            self.executor,
            dict(self.model.named_parameters()),
            StepHooks(check=self.require_attached, stepped=self.meter.stepped, drop=self.zero_grad),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            no_decay=no_decay,
            moments=moments,
            seed=seed,
        )
        return self._optimizer

    def require_attached(self) -> None:
        """Raise ModelError after detach."""
        if self.model.__dict__.get("_megatrain_engine") is not self:
            raise ModelError("the engine was detached from its model; call megatrain.attach again")

    def zero_grad(self) -> None:
        """Drop the gradients gathered since the last step; those that wait for their update are not yours."""
        if self.gradients.blocks:
            self.meter.drop()
        self.gradients.clear()

    def sync(self) -> None:
        """Wait for every update, and make the parameters whole: call it before any read of weights.

        Updates of the `deferred` schedule run in the background until the next step's copies need them.
        Weights that live on drives are read into RAM, until the next `opt.step()`.

        Raises:
            CapacityError: There is no room for them.
        """
        self.settle()
        if self._tiered is not None:
            self._tiered.bring_working()

    def settle(self) -> None:
        """Wait for every update: `host.borrow` then lends every block as the last step has left it."""
        self.executor.sync()

    def commit(
        self,
        step: int,
        meta: Mapping[str, Any],
        *,
        finish: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Make the state after the last `opt.step()` what a crash leaves on the drives; returns at once.

        It is done in the background, before the next step writes anything. What lives in RAM is written to
        the drives for it: 12 bytes per parameter, or 2 of blocks whose remainder and moments are there.

        Args:
            step: Its number.
            meta: Plain JSON values, as they are now.
            finish: Called when the step's updates are done; returns what to add to `meta`.

        Raises:
            ConfigError: No state is on drives.
        """
        if self.executor.drives is None:
            raise ConfigError("engine.commit needs state on drives; attach with tiers, or save a checkpoint")
        self.executor.commit(step, meta, finish)

    def weights_changed(self) -> None:
        """Take note that the caller has written to the host state: copies on the device are out of date."""
        if self._tiered is not None:
            self._tiered.keep_working()
            self._tiered.mark_changed()
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

        On CUDA all that torch allocated; elsewhere slots, resident blocks and gradient buffers.
        """
        return self.lanes.peak_bytes

    @property
    def bytes_fetched(self) -> int:
        """Bytes copied to the device since attach."""
        return self.executor.counts.fetch_bytes

    @property
    def bytes_offloaded(self) -> int:
        """Bytes of gradients copied home since attach."""
        return self.executor.counts.offload_bytes

    @property
    def last_step(self) -> StepReport:
        """Where the time of the newest complete step went; see `StepReport` for what counts when.

        Read it after `opt.step()`, and on CUDA after the step's loss or `grad_norm`: until then the device is
        still at work. The device is not waited for, but the first reading measures `matmul_peak`.

        Raises:
            ConfigError: No step is complete.
        """
        return self.meter.report()

    @property
    def matmul_peak(self) -> float | None:
        """FLOP/s of a large matrix product in the working dtype, measured once; None: the device is full.

        Of an emulated accelerator with a rate, that rate.
        """
        if self.lanes.matmul_flops_per_s is not None:
            return self.lanes.matmul_flops_per_s
        dtype = torch.bfloat16 if self.host.precision is Precision.BF16 else torch.float32
        try:
            return measure_matmul_peak(self.lanes.device, dtype)
        except torch.OutOfMemoryError:
            return None

    @property
    def chunked_tokens(self) -> int:
        """Tokens that have passed the head in chunks since attach; their backward passes it again."""
        return self._model_forward.chunked_tokens

    @property
    def layer_modules(self) -> list[nn.Module]:
        """The decoder layers, in forward order."""
        return [layer.module for layer in self._layers]

    @property
    def forwards_again(self) -> list[int]:
        """How often a step runs each layer's forward again, whole, for each micro-batch."""
        rounds = self.rounds
        blocks = [v.block for v in rounds.visits(1, loads=False, completes=True) if not v.is_backward]
        visits = {number: blocks.count(plan.blocks[-1]) for number, plan in enumerate(rounds.plans)}
        return recomputed_forwards(self.choice.policies, visits, rounds.first_trained)

    @property
    def updates(self) -> str:
        """When an optimizer updates: `deferred`, `immediate` or `serial`."""
        return self.choice.updates

    @property
    def outer_blocks(self) -> list[int]:
        """Blocks that are no part of a decoder layer: they are in use during a whole pass."""
        return [block.index for block in self._outer]

    # -- attaching ------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give the model back: its parameters keep their values, in the working dtype, in host memory.

        State on drives is removed; a later `attach` begins from these values.
        """
        if self.model.__dict__.get("_megatrain_engine") is not self:
            return
        self.sync()
        self._model_forward.remove()
        self._settings.close()
        self.lanes.close()
        self._close_scratch()
        self.model._megatrain_engine = None
        if self._tiered is not None:
            self._tiered.on_drives.store.remove()
            self.model.__dict__.pop("_megatrain_host", None)

    def close(self, *, removes: bool = False) -> None:
        """Finish all work and let go of threads and drives; the model is not given back.

        Args:
            removes: Remove what is on the drives: nobody will go on from there.
        """
        try:
            self.lanes.close()
        finally:
            self._close_scratch()
            if self._tiered is not None:
                (self._tiered.on_drives.store.remove if removes else self._tiered.on_drives.store.close)()

    def _close_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def _recover(self) -> None:
        """After an exception inside a step: drop the step."""
        self.rounds.drop()
        self.zero_grad()
        self.meter.drop()
