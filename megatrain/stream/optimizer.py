"""AdamW over the engine's host state, as a torch optimizer: schedulers and callbacks see `param_groups`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.errors import ConfigError, ModelError
from megatrain.model.layout import Entry, aligned
from megatrain.optim.adamw import AdamWStep, Planes, update_many
from megatrain.optim.clip import clip_coefficient, global_norm
from megatrain.optim.pool import default_pool
from megatrain.plan.program import optimizer_program
from megatrain.store.state import BlockState, split_gradient

if TYPE_CHECKING:
    from megatrain.stream.engine import Engine


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step did."""

    grad_norm: float
    """Global norm of the step's gradients before clipping: an fp32 value."""
    skipped: bool
    """The norm was not finite, and nothing was changed."""


class StreamedAdamW(torch.optim.Optimizer):
    """Decoupled-weight-decay Adam with fp32 masters, bitwise equal to `torch.optim.AdamW(fused=True)`.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        no_decay: Iterable[str] | None,
    ) -> None:
        """Allocate the moments, and the gradients too if clipping holds them back; see `Engine.adamw`."""
        _check_ranges(lr, betas, eps, weight_decay, max_grad_norm)
        self._engine = engine
        self._max_grad_norm = max_grad_norm
        self.num_skipped = 0
        """Steps that changed nothing, because their norm was not finite."""
        parameters = dict(engine.model.named_parameters())
        managed = {entry.name: entry for state in engine.host.blocks for entry in state.layout.trained}
        foreign = [
            name for name, parameter in parameters.items() if parameter.requires_grad and name not in managed
        ]
        if foreign:
            raise ModelError(
                f"parameter {foreign[0]} ({len(foreign)} in all) requires a gradient but was not "
                "there, or was frozen, when the engine was attached; attach after adapters are added and "
                "requires_grad is set"
            )
        if not managed:
            raise ModelError("no parameter requires a gradient; nothing would be trained")
        patterns = None if no_decay is None else tuple(no_decay)
        decayed = [name for name, entry in managed.items() if _decays(entry, patterns)]
        exempt = [name for name in managed if name not in set(decayed)]
        groups: list[dict[str, Any]] = [
            {
                "params": [parameters[name] for name in decayed],
                "names": decayed,
                "weight_decay": weight_decay,
            },
            {"params": [parameters[name] for name in exempt], "names": exempt, "weight_decay": 0.0},
        ]
        super().__init__(
            [group for group in groups if group["params"]], {"lr": lr, "betas": betas, "eps": eps}
        )
        self._group_of = {
            name: number for number, group in enumerate(self.param_groups) for name in group["names"]
        }
        self.steps = dict.fromkeys(managed, 0)
        """Updates that each parameter has had: the t of its bias correction."""
        engine.host.allocate_moments()
        if max_grad_norm is not None:
            engine.host.allocate_gradients()

    @torch.no_grad()
    def step(self, closure: None = None) -> StepStats:  # type: ignore[override]
        """Clip and apply the gradients of the step, or skip it if their norm is not finite.

        Raises:
            ConfigError: A closure was given, or there is no gradient.
            ModelError: A gradient went past the engine into `parameter.grad`.
        """
        if closure is not None:
            raise ConfigError("AdamW.step takes no closure; call engine.forward_backward before it")
        self._engine.require_attached()
        gradients, executor = self._engine.gradients, self._engine.executor
        if not gradients.blocks:
            raise ConfigError(
                "opt.step() found no gradient; call engine.forward_backward or loss.backward() first"
            )
        self._refuse_foreign_gradients()
        executor.take_gradients_home()
        norm_operation, *updates = optimizer_program(gradients.blocks)
        norms: list[float] = []
        executor.run_on_host(norm_operation, lambda: norms.append(global_norm(gradients.sums())))
        norm = norms[0]
        skipped = not math.isfinite(norm)
        if skipped:
            self.num_skipped += 1
        else:
            scale = clip_coefficient(norm, self._max_grad_norm)
            for operation in updates:
                executor.run_on_host(operation, partial(self._update, operation.block, scale))
        gradients.clear()
        if self._max_grad_norm is None:
            self._engine.host.drop_gradients()
        if not skipped:
            executor.invalidate()
        return StepStats(norm, skipped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered since the last step."""
        self._engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the moments are in the host planes, and a dictionary without them would lose them.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "the optimizer's state lives in the engine's host memory; `megatrain train` saves it in its "
            "checkpoints"
        )

    def _update(self, block: int, scale: float) -> None:
        state = self._engine.host.blocks[block]
        present = self._engine.gradients.present[block]
        work: list[tuple[AdamWStep, Planes]] = []
        runs: list[tuple[tuple[int, int], int, int]] = []
        for entry in state.layout.trained:
            if entry.name not in present:
                continue
            self.steps[entry.name] += 1
            key = (self._group_of[entry.name], self.steps[entry.name])
            assert entry.state_offset is not None
            stop = entry.state_offset + aligned(entry.numel)
            edge = state.layout.num_split
            if runs and runs[-1][0] == key and runs[-1][2] == entry.state_offset != edge:
                runs[-1] = (key, runs[-1][1], stop)
            else:
                runs.append((key, entry.state_offset, stop))
        for (group_number, count), start, stop in runs:
            group = self.param_groups[group_number]
            hyper = AdamWStep(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=count,
                grad_scale=scale,
            )
            work.append((hyper, _planes(state, start, stop)))
        update_many(default_pool(), work)

    def _refuse_foreign_gradients(self) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    raise ModelError(
                        f"parameter {name} got a gradient outside the engine (parameter.grad is set): a part "
                        "of the model was called on its own; compute the loss through model(...)"
                    )


def _planes(state: BlockState, start: int, stop: int) -> Planes:
    """View a state range in all planes. Trained entries lie in the working bytes as in the state space."""
    assert state.exp_avg is not None
    assert state.exp_avg_sq is not None
    assert state.gradient is not None
    layout = state.layout
    low, full = split_gradient(state.gradient, layout)
    first = next(entry for entry in layout.trained if entry.state_offset == start)
    nbytes = (stop - start) * first.dtype.itemsize
    working: Tensor = state.working[first.byte_offset : first.byte_offset + nbytes].view(first.dtype)
    is_split = start < layout.num_split
    edge = 0 if is_split else layout.num_split
    return Planes(
        working=working,
        remainder=state.remainder[start:stop] if is_split and state.remainder is not None else None,
        exp_avg=state.exp_avg[start:stop],
        exp_avg_sq=state.exp_avg_sq[start:stop],
        gradient=(low if is_split else full)[start - edge : stop - edge],
    )


def _decays(entry: Entry, patterns: tuple[str, ...] | None) -> bool:
    if patterns is None:
        return len(entry.shape) >= 2 and not entry.name.endswith("bias")
    return not any(fnmatch(entry.name, pattern) for pattern in patterns)


def _check_ranges(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float | None
) -> None:
    problems = [
        (not 0.0 <= lr < math.inf, f"lr is {lr}; use a finite number of 0 or more"),
        (not all(0.0 <= beta < 1.0 for beta in betas), f"betas is {betas}; each must be in [0, 1)"),
        (not 0.0 <= eps < math.inf, f"eps is {eps}; use a finite number of 0 or more"),
        (
            not 0.0 <= weight_decay < math.inf,
            f"weight_decay is {weight_decay}; use a finite number of 0 or more",
        ),
        (
            max_grad_norm is not None and not 0.0 < max_grad_norm < math.inf,
            f"max_grad_norm is {max_grad_norm}; use a positive number, or None for no clipping",
        ),
    ]
    for is_wrong, message in problems:
        if is_wrong:
            raise ConfigError(message)
