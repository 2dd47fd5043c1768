"""Takes the gradients of backwards into device buffers, in the order of compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatrain.config.runs import Runs, StepSums, SumRoom
from megatrain.plan.program.buffers import gradients_buffer
from megatrain.plan.program.features.roles import BlockPass
from megatrain.plan.program.kinds import Lane
from megatrain.store.state import Precision
from megatrain.stream.execute.gradient_buffers import Home
from megatrain.stream.execute.issuer import Issuer


class GradientIntake:
    """Gradients within the visits of a round, and what joins them when no more come."""

    def __init__(self, issuer: Issuer) -> None:
        """Collect into the gradient buffers of an engine's parts."""
        self._issuer = issuer
        self._lanes, self._gradients = issuer.lanes, issuer.gradients

    def collect_resident(self, block: int, micro_batch: int, grads: Sequence[Tensor | None]) -> None:
        """Take one backward's gradients of a resident block."""
        buffer = [("resident_gradient", block)]
        self._lanes.begin(Lane.COMPUTE, writes=buffer)
        self._gradients.collect_resident(block, micro_batch, grads)
        self._lanes.end(Lane.COMPUTE, writes=buffer)

    def collect_part(self, operation: BlockPass, grads: Sequence[Tensor | None]) -> None:
        """Take a part of the gradients of an open visit, by its operation."""
        writes = operation.writes
        self._lanes.begin(Lane.COMPUTE, writes=writes)
        self._gradients.collect(operation, grads)
        self._lanes.end(Lane.COMPUTE, writes=writes)

    def leave_round(self, block: int, gradient_buffer: int = -1) -> None:
        """Join the partial sums of a block that no later backward of the round passes."""
        buffer = [gradients_buffer(block, gradient_buffer)]
        self._lanes.begin(Lane.COMPUTE, writes=buffer)
        self._gradients.leave_round(block, gradient_buffer)
        self._lanes.end(Lane.COMPUTE, writes=buffer)

    def leave_residents(self) -> None:
        """Join the partial sums of blocks on the device: of all, where other ranks may have gradients."""
        gradients = self._gradients
        if not gradients.has_runs:
            return
        are_all = gradients.shared is not None
        blocks = range(len(self._issuer.host.layouts)) if are_all else gradients.still_at(Home.DEVICE)
        for block in blocks:
            if gradients.buffers.is_resident(block) and block not in gradients.run_sums.summed:
                self.leave_round(block)

    def round_residents(self) -> None:
        """Round the sums of blocks on the device to the working dtype, as those of others are at home."""
        for block in self._gradients.still_at(Home.DEVICE):
            buffer = [gradients_buffer(block, -1)]
            self._lanes.begin(Lane.COMPUTE, writes=buffer)
            self._gradients.round_in_place(block)
            self._lanes.end(Lane.COMPUTE, writes=buffer)

    def prepare(self, *, adds_up: bool, num_rounds: int, kept: SumRoom | None = None) -> None:
        """Make room for a step's gradients; waits for whoever uses the ring only if it has to grow.

        Args:
            adds_up: Gradients of several micro-batches add up, in a round or over rounds.
            num_rounds: The number of rounds of the step.
            kept: Room for partial sums that are kept between rounds; None: these are not foreseen together.
        """
        buffers = self._gradients.buffers
        if kept is None:
            is_wide = self._issuer.host.precision is Precision.BF16
            sums = StepSums(Runs(), (1,) * num_rounds, on_drives=buffers.sums_on_drives)
            kept = sums.between(is_wide=is_wide)
        needs: dict[str, Any] = {"adds_up": adds_up, "num_rounds": num_rounds, "kept": kept}
        if buffers.needs_room(**needs):
            ring = [("gradient_buffer", index) for index in range(buffers.num_buffers)]
            with self._issuer.touching(writes=ring):
                buffers.prepare(**needs)
