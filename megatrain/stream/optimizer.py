"""An optimizer over the engine's host state, as torch's: schedulers and callbacks see `param_groups`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megatrain.config.choice import Updates
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.errors import CheckpointError, ConfigError, ModelError
from megatrain.layout.block_bytes import aligned
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING
from megatrain.optim.clip import check_max_norm, global_norm
from megatrain.optim.updates import RangeStep, rounding_key
from megatrain.plan.program.features.roles import StateUpdate
from megatrain.plan.program.operations import Work
from megatrain.stream.choice_checks import check_updates
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.memory_watch import MemoryWatch
from megatrain.stream.execute.parts import OptimizerWork
from megatrain.stream.execute.updates import BlockUpdate, StepStats, check_shares
from megatrain.stream.forward.overrides import USE_OURS
from megatrain.stream.parameter_groups import Grouping


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHooks:
    """What an optimizer calls of the engine that has made it."""

    check: Callable[[], None]
    """Before a step: raises if the engine cannot take one."""
    stepped: Callable[[], None]
    """After it."""
    drop: Callable[[], None]
    """Drops the gradients gathered since the last step."""
    fail: Callable[[BaseException], None]
    """Drops them after an error in the middle of a step."""


class _Updated(NamedTuple):
    """A parameter of a block, or a part of it, that is in a group."""

    key: str
    """Names it, as its `Entry` does."""
    group: int
    start: int
    """First index in the block's state space."""
    stop: int
    first: int
    """Index in the whole parameter of its first element."""


class StreamedOptimizer(torch.optim.Optimizer):
    """An optimizer of `megatrain.config.optimizers`, whose state lives in the planes of the engine.

    AdamW with its moments in fp32 is bitwise equal to `torch.optim.AdamW(fused=True)`.
    """

    def __init__(
        self,
        executor: Executor,
        parameters: Mapping[str, nn.Parameter],
        hooks: StepHooks,
        optimizer: Optimizer,
        hyper: Mapping[str, Any],
        *,
        max_grad_norm: float | None,
        grouping: Grouping,
        seed: int = 0,
    ) -> None:
        """Allocate the planes, and the gradients too if clipping holds them back.

        Args:
            executor: The executor that runs the steps, with the state that is updated.
            parameters: All parameters of the model, by name.
            hooks: The hooks by which the optimizer calls the engine that has made it.
            optimizer: The optimizer, with its state in one format.
            hyper: The learning rate, the decay and the optimizer's own settings; what is left out is usual.
            max_grad_norm: The norm to which gradients are clipped; None: no clipping.
            grouping: The grouping of the parameters.
            seed: The seed of stochastic rounding.
        """
        optimizer.require_elements("updates cut")
        optimizer.check(hyper)
        check_max_norm(max_grad_norm)
        hyper = optimizer.defaults() | dict(hyper)
        weight_decay = hyper.pop("weight_decay")
        self._executor = executor
        self._hooks = hooks
        self.kind = optimizer
        """What is kept and moved, and how."""
        self._seed = seed
        self._max_grad_norm = max_grad_norm
        check_updates(executor.spec.updates, max_grad_norm)
        self._has_stepped = False
        self.last_stats: StepStats | None = None
        """Of the newest step."""
        self.moments_are_kept_beside = False
        """A trainer of `megatrain.hf` saves the planes itself, and `state_dict` returns everything else."""
        self.num_skipped = 0
        """Steps that changed nothing, because their norm was not finite."""
        managed = {entry.name: entry for state in executor.host.blocks for entry in state.layout.trained}
        foreign = [
            name for name, parameter in parameters.items() if parameter.requires_grad and name not in managed
        ]
        if foreign:
            raise ModelError(
                f"parameter {foreign[0]} ({len(foreign)} in all) requires a gradient but was not "
                "there, or was frozen, when the engine was attached; add adapters and set requires_grad "
                "before attach, or in megatrain.reattach(engine, lambda model: ...)"
            )
        if not managed:
            raise ModelError("no parameter requires a gradient; nothing would be trained")
        self._is_made = False
        super().__init__(grouping.make(parameters, managed, optimizer, weight_decay), hyper)
        self._is_made = True
        self._group_of = {
            name: number for number, group in enumerate(self.param_groups) for name in group["names"]
        }
        self._updated = [
            [
                _Updated(
                    entry.key,
                    self._group_of[entry.name],
                    start,
                    start + aligned(entry.numel),
                    entry.first_index,
                )
                for entry in state.layout.trained
                if entry.name in self._group_of and (start := entry.state_offset) is not None
            ]
            for state in executor.host.blocks
        ]
        """By block: its parameters in a group."""
        self._counts = {
            entry.key: (entry.name, 0) for state in executor.host.blocks for entry in state.layout.trained
        }
        """By entry: its parameter, and the updates that it has had."""
        self.memory_watch: MemoryWatch | None = None
        """Looks at the state in RAM, once `watch_memory` is called."""
        executor.host.allocate_planes(optimizer)
        self.take_part(executor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take a group while the optimizer is made, and none afterwards.

        Raises:
            ConfigError: The optimizer is made.
        """
        if self._is_made:
            raise ConfigError(
                "add_param_group: the optimizer is made, and the group would not be trained; give all groups "
                "to engine.adamw(groups=[...]), or to the torch.optim.AdamW that a trainer is given"
            )
        super().add_param_group(param_group)

    def take_part(self, executor: Executor) -> None:
        """Go on with an executor that is new: the engine is arranged in another way."""
        self._executor = executor
        if executor.gradients.shared.ranks.size > 1:
            check_shares(self.kind, has_residents=bool(executor.states.blocks))
        if self.memory_watch is not None:
            self.memory_watch.take_part(executor)
        _plan_updates(executor, self.kind, clips=self._max_grad_norm is not None)
        executor.states.allocate()
        if self.updates is Updates.IMMEDIATE:
            if executor.gradients.blocks:
                raise ConfigError(
                    "updates=immediate needs the optimizer before the first backward; call engine.adamw "
                    "first, or opt.zero_grad() before it"
                )
            executor.gradients.buffers.num_staging = NUM_GRADIENT_STAGING
            executor.parts.optimizer = OptimizerWork(self._update_at_once)
        elif self._max_grad_norm is not None and executor.gradients.buffers.in_ram:
            executor.host.planes.allocate_gradients(executor.gradients.buffers.in_ram)

    def watch_memory(self, rotation: int) -> MemoryWatch:
        """Watch the state in RAM from the next step on: an error ends a step if a value changes by itself.

        Values of the state are then written by updates and by the engine alone, and by nobody else.

        Args:
            rotation: The number of steps in which each part of the state is watched for one, and each frozen
                weight is compared once.
        """
        trained = [[(part.start, part.stop) for part in parts] for parts in self._updated]
        self.memory_watch = MemoryWatch(self._executor, trained, rotation)
        return self.memory_watch

    @torch.no_grad()
    def step(self, closure: None = None) -> StepStats:  # type: ignore[override]
        """Clip and apply the gradients of the step, or skip it if their norm is not finite.

        With deferred updates, this returns at once and the work is done in the background.

        Raises:
            ConfigError: A closure was given, or there is no gradient.
            ModelError: A gradient went past the engine into `parameter.grad`.
        """
        if closure is not None:
            raise ConfigError("opt.step takes no closure; call engine.forward_backward before it")
        self._hooks.check()
        executor = self._executor
        gradients = executor.gradients
        if not gradients.blocks:
            raise ConfigError(
                "opt.step() found no gradient; call engine.forward_backward or loss.backward() first"
            )
        self._has_stepped = True
        try:
            stats = self._issue_step(executor)
        except BaseException as error:
            self._hooks.fail(error)
            raise
        self._hooks.stepped()
        self.last_stats = stats
        return stats

    def _issue_step(self, executor: Executor) -> StepStats:
        executor.complete_gradients(leave=executor.states.blocks)
        is_immediate = self.updates is Updates.IMMEDIATE
        stats = StepStats(executor.wait_for_norm, can_skip=not is_immediate)
        executor.host.weights.drop()
        waits_for = None if is_immediate else stats
        update = partial(self._update, self._snapshot(), waits_for)
        executor.update(OptimizerWork(update, partial(self._norm, stats)))
        executor.gradients.clear()
        executor.invalidate()
        if self.updates is Updates.SERIAL:
            executor.sync()
        return stats

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered since the last step, and those that went past the engine."""
        self._hooks.drop()
        super().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the planes, which are in host memory, for who keeps them beside.

        To others a dictionary without the planes would lose them. Before a step there are none, and
        accelerate, and with it Trainer, asks for the state of an optimizer that it is given.

        Raises:
            ConfigError: A step was made, and nobody keeps the planes.
            TornStateError: An update has failed before.
        """
        self._executor.integrity.check()
        if self._has_stepped and not self.moments_are_kept_beside:
            raise ConfigError(
                "the optimizer's state lives in the engine's host memory; `megatrain train` and the trainers "
                "of megatrain.hf save it in their checkpoints"
            )
        return super().state_dict() | {"steps": dict(self.steps), "num_skipped": self.num_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` has returned.

        Raises:
            CheckpointError: Parameters were in other groups.
        """
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if saved != own:
            raise CheckpointError(
                f"the checkpoint's optimizer has groups of {saved} parameters, and this one of {own}; make "
                "the groups that it was trained with"
            )
        super().load_state_dict(state_dict)
        self.steps = state_dict["steps"]
        self.num_skipped = int(state_dict["num_skipped"])
        self._has_stepped = any(self.steps.values())

    def train(self) -> None:
        """Refuse to be stepped by transformers' own Trainer, which calls this before its first forward.

        Raises:
            ConfigError: It would log a norm of 0, as gradients are in the engine, and save no state.
        """
        if not self.moments_are_kept_beside:
            raise ConfigError(
                "transformers' Trainer, and TRL's, cannot read a streamed step's norm or save its state; "
                f"{USE_OURS}"
            )

    def _norm(self, stats: StepStats, blocks: Sequence[int]) -> Work:
        """Return what makes the norm of the gradients of `blocks` known."""
        gradients, watch = self._executor.gradients, self.memory_watch
        step = 0 if watch is None else watch.step

        def work() -> None:
            try:
                norm = global_norm(gradients.sums(blocks))
            except BaseException as error:
                stats.fail(error)
                raise
            self.num_skipped += stats.can_skip and not math.isfinite(norm)
            stats.settle(norm)
            if watch is not None:
                watch.check_frozen(step)

        return work

    def _update(
        self, groups: Sequence[Mapping[str, Any]], waits_for: StepStats | None, operation: StateUpdate
    ) -> Work:
        """Return what an update runs, with all that may change before it runs."""
        executor, block = self._executor, operation.block
        ranges = partial(self.ranges, block, groups, executor.gradients.present[block])
        return BlockUpdate(executor, operation, ranges, waits_for, self._max_grad_norm, self.memory_watch).run

    def _update_at_once(self, operation: StateUpdate) -> Work:
        return self._update(self._snapshot(), None, operation)

    def _snapshot(self) -> list[dict[str, Any]]:
        """Copy the hyper-parameters as they are now: a scheduler may change them before an update runs."""
        return [
            {name: group[name] for name in self.kind.defaults()} | {"lr": float(group["lr"])}
            for group in self.param_groups
        ]

    def ranges(
        self, block: int, groups: Sequence[Mapping[str, Any]], present: Set[str], scale: float
    ) -> list[tuple[RangeStep, int, int]]:
        """Count one more update of the parameters in `present`, and list the state ranges that it covers."""
        num_split = self._executor.host.blocks[block].layout.num_split
        runs: list[tuple[tuple[int, int], int, int]] = []
        keys: dict[int, tuple[int, int]] = {}
        firsts: dict[int, int] = {}
        for part, group, start, stop, first in self._updated[block]:
            name, count = self._counts[part]
            if name not in present:
                continue
            self._counts[part] = name, count + 1
            key = (group, count + 1)
            adjoins = runs and runs[-1][0] == key and runs[-1][2] == start != num_split
            if adjoins and not self.kind.draws_noise:
                runs[-1] = (key, runs[-1][1], stop)
            else:
                runs.append((key, start, stop))
                if self.kind.draws_noise:  # a range is one parameter: its own key and scales
                    keys[start] = rounding_key(self._seed, name, key[1])
                    firsts[start] = first
        own = self._executor.gradients.shared.updated[block]
        cut = [(key, start, part) for key, start, stop in runs for part in own.cut(start, stop)]
        return [
            (
                RangeStep(
                    hyper=groups[number],
                    count=count,
                    grad_scale=scale,
                    noise=(*keys[start], firsts[start] + part.start - start) if keys else (0, 0, 0),
                ),
                part.start,
                part.stop,
            )
            for (number, count), start, part in cut
        ]

    @property
    def steps(self) -> dict[str, int]:
        """Updates that each parameter has had: the t of its bias correction."""
        return dict(self._counts.values())

    @steps.setter
    def steps(self, steps: Mapping[str, int]) -> None:
        self._counts = {key: (name, int(steps[name])) for key, (name, _) in self._counts.items()}

    @property
    def updates(self) -> Updates:
        """When blocks are updated."""
        return Updates(self._executor.spec.updates)

    @property
    def max_grad_norm(self) -> float | None:
        """Norm to which gradients are clipped; None: no clipping."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        """Clip to another norm, or no more, from the next step on.

        Raises:
            ConfigError: The norm is no positive number, or blocks are updated before the norm is known.
        """
        check_max_norm(value)
        check_updates(self.updates.value, value)
        if (value is None) is not (self._max_grad_norm is None):
            self._executor.spec = replace(self._executor.spec, clips=value is not None)
        self._max_grad_norm = value


def _plan_updates(executor: Executor, optimizer: Optimizer, *, clips: bool) -> None:
    """Let programs know of the optimizer: what its state takes, and whether it clips."""
    shared = executor.gradients.shared
    sizes = [
        shared.with_optimizer(number, size, optimizer) for number, size in enumerate(executor.spec.sizes)
    ]
    executor.spec = replace(executor.spec, sizes=sizes, clips=clips)


def __getattr__(name: str) -> Any:
    """Return the class under the name that it had when AdamW was the only optimizer."""
    if name != "StreamedAdamW":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("StreamedAdamW is deprecated: use StreamedOptimizer", DeprecationWarning, stacklevel=2)
    return StreamedOptimizer
