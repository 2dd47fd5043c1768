"""The update of one block, on the host or on the device, and the norm that it waits for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TypeAlias

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import SCALE_NUMEL, Optimizer, num_scales
from megatrain.errors import ConfigError, ModelError
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import Share
from megatrain.optim.clip import clip_coefficient
from megatrain.optim.pool import default_pool
from megatrain.optim.tasks import Apart
from megatrain.optim.updates import RangePlanes, RangeStep, kernels_of
from megatrain.plan.program.features.roles import StateUpdate
from megatrain.store.block_state import split_gradient
from megatrain.stream.execute.executor import Executor
from megatrain.stream.execute.memory_watch import MemoryWatch

Ranges: TypeAlias = Callable[[float], list[tuple[RangeStep, int, int]]]
"""Returns hyper-parameters and state ranges `[start, stop)` of an update, for a factor on the gradient."""

SCALES_ON_DEVICES = (
    "optim.state is {}, which does not go with resident blocks (memory.resident_blocks) on several ranks: "
    "two may have elements of one scale; use optim.state=bf16, or memory.resident_blocks=0"
)


class StepStats:
    """What one optimizer step did. Reading it waits until the step's norm is known."""

    def __init__(self, wait: Callable[[], object], *, can_skip: bool) -> None:
        """Expect a norm.

        Args:
            wait: The function that returns when the norm is known, or raises why it never will be.
            can_skip: A claim that a norm that is not finite leaves everything as it is.
        """
        self._wait = wait
        self._norm: Future[float] = Future()
        self._scale: float | None = None
        self.can_skip = can_skip

    def settle(self, norm: float) -> None:
        """Make the norm known."""
        self._norm.set_result(norm)

    def fail(self, error: BaseException) -> None:
        """Make known why there is none."""
        self._norm.set_exception(error)

    @property
    def grad_norm(self) -> float:
        """Global norm of the step's gradients before clipping: an fp32 value.

        Raises:
            BaseException: What kept the norm from being known.
            ModelError: Something did, and it was raised before.
        """
        if not self._norm.done():
            self._wait()
            if not self._norm.done():
                raise ModelError("the norm of this step is not known: one of the step's operations failed")
        return self._norm.result()

    @property
    def skipped(self) -> bool:
        """The norm was not finite, and nothing was changed."""
        return self.can_skip and not math.isfinite(self.grad_norm)

    def scale(self, max_grad_norm: float | None) -> float | None:
        """Return the factor on the step's gradients, once the norm is known; None: the step is skipped."""
        if self._scale is None and not self.skipped:
            self._scale = clip_coefficient(self.grad_norm, max_grad_norm)
        return self._scale


class BlockUpdate:
    """One block's update, with everything that it needs as it was when the step ended."""

    def __init__(
        self,
        executor: Executor,
        operation: StateUpdate,
        ranges: Ranges,
        stats: StepStats | None,
        max_grad_norm: float | None,
        watch: MemoryWatch | None = None,
    ) -> None:
        """Keep what the update needs.

        Args:
            executor: The executor whose state and gradients these are.
            operation: The update of the block.
            ranges: The function that returns the state ranges that the update covers, and counts it.
            stats: The statistics of the step; None: nothing is clipped or skipped.
            max_grad_norm: The norm to which gradients are clipped; None: no clipping.
            watch: What looks at the state in RAM; None: nothing does.
        """
        self._executor = executor
        self._watch = watch
        self._step = 0 if watch is None else watch.step
        self._operation = operation
        self._ranges = ranges
        self._stats = stats
        self._max_grad_norm = max_grad_norm

    def run(self) -> None:
        """Update the block's state where it is; nothing if the step is skipped.

        Raises:
            HardwareError: The state has changed by itself since its last update.
        """
        scale = 1.0 if self._stats is None else self._stats.scale(self._max_grad_norm)
        if scale is None:
            if self._watch is not None:
                self._watch.check(self._operation.block, self._step)
            return
        if self._operation.on_device:
            self._run_on_device(scale)
        else:
            self._run_on_host(scale)

    def _run_on_host(self, scale: float) -> None:
        executor, operation = self._executor, self._operation
        state = executor.host.blocks[operation.block]
        share = None
        planes: Mapping[str, Tensor]
        if operation.drive_staging >= 0:
            planes, share = executor.drives.planes(operation.block, operation.drive_staging)
            executor.drives.updated(operation.drive_staging)
        else:
            planes = {"working": state.working, **state.planes}
        ranges = self._ranges(scale)
        gradient = split_gradient(executor.gradients.home(operation.block, operation.staging), state.layout)
        views = _view(executor.host.optimizer, planes, gradient, state.layout, ranges, share)
        apart: list[list[Apart]] = []
        if self._watch is not None and operation.drive_staging < 0:
            places = [(start, stop) for _, start, stop in ranges]
            apart = self._watch.around(operation.block, places, [planes for _, planes in views], self._step)
        kernels_of(executor.host.optimizer).update_on_host(default_pool(), views, apart)

    def _run_on_device(self, scale: float) -> None:
        executor, block = self._executor, self._operation.block
        layout, share = executor.host.blocks[block].layout, executor.gradients.buffers.shares[block]
        planes = executor.states.planes(block)
        flat = executor.gradients.buffers.sums(block)
        optimizer = executor.host.optimizer
        kernels = kernels_of(optimizer)
        low, full = flat[: layout.num_split], flat[layout.num_split :]
        if executor.lanes.updates_with_kernels:
            gradient = low.to(torch.bfloat16), full  # they were rounded to it before
            views = _view(optimizer, planes, gradient, layout, self._ranges(scale), share)
            kernels.update_on_host(default_pool(), views)
            return
        views = _view(optimizer, planes, (low, full), layout, self._ranges(scale), share)
        with executor.lanes.computing():
            kernels.update_on_device(executor.lanes.device, views)


def check_shares(optimizer: Optimizer, *, has_residents: bool) -> None:
    """Refuse planes with scales where their blocks are resident: ranks keep shares of these on devices.

    Raises:
        ConfigError: Such blocks are resident.
    """
    if optimizer.has_scales and has_residents:
        raise ConfigError(SCALES_ON_DEVICES.format(optimizer.state))


def _view(
    optimizer: Optimizer,
    planes: Mapping[str, Tensor],
    gradient: tuple[Tensor, Tensor],
    layout: BlockLayout,
    ranges: Iterable[tuple[RangeStep, int, int]],
    share: Share | None = None,
) -> list[tuple[RangeStep, RangePlanes]]:
    """View state ranges in all planes. Trained entries lie in the working bytes as in the state space.

    Args:
        optimizer: The optimizer whose planes they are.
        planes: The planes by name, `working` and the remainder among them.
        gradient: The gradient of the whole block: its bf16 and its fp32 part.
        layout: The layout of the block.
        ranges: The ranges to update.
        share: The share whose remainder and optimizer state these are; None: those of the whole block.
    """
    working, remainder = planes["working"], planes.get("remainder")
    starts = [entry.state_offset or 0 for entry in layout.trained]
    places = layout.scale_ranges if optimizer.has_scales else {}
    views = []
    for step, start, stop in ranges:
        first = layout.trained[bisect_right(starts, start) - 1]
        assert first.state_offset is not None
        begin = first.byte_offset + (start - first.state_offset) * first.dtype.itemsize
        nbytes = (stop - start) * first.dtype.itemsize
        is_split = start < layout.num_split
        edge = 0 if is_split else layout.num_split
        at = start if share is None else share.place(start)
        own = slice(at, at + stop - start)
        state = {}
        for name, plane in optimizer.planes.items():
            part = own
            if plane.is_scale:
                scale = places[first.name][0] + (start - first.state_offset) // SCALE_NUMEL
                part = slice(scale, scale + num_scales(stop - start))
            state[name] = planes[name][part]
        view = RangePlanes(
            working=working[begin : begin + nbytes].view(first.dtype),
            remainder=remainder[own] if is_split and remainder is not None else None,
            gradient=gradient[0 if is_split else 1][start - edge : stop - edge],
            state=state,
        )
        views.append((step, view))
    return views
