"""Where a step's gradients are: from autograd into device buffers, home to the host, and their norm.

Gradients add up in fp32 and are rounded to the working dtype once, when they are complete. A gradient that
one backward of a streamed block makes alone is in the working dtype already and travels as it is. A
parameter for which autograd gave None in every round has no gradient and gets no update, as in torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from megatrain.config.runs import Runs, StepSums, SumRoom
from megatrain.errors import ConfigError
from megatrain.layout.blocks import Entry
from megatrain.optim.pool import default_pool
from megatrain.optim.sums import add, add_last, sum_of_squares
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.buffers import gradients_buffer
from megatrain.plan.program.features.gradients import Load, Offload
from megatrain.plan.program.features.ranks import ExchangeSums
from megatrain.plan.program.features.roles import BlockPass
from megatrain.plan.program.features.waiting import unparked
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Work
from megatrain.store.block_state import part_of_plane, split_gradient
from megatrain.store.precision import Precision
from megatrain.store.state import HostState
from megatrain.stream.execute.gradient_buffers import GradientBuffers, Home, round_into
from megatrain.stream.execute.run_sums import RunSums
from megatrain.stream.lanes import Lanes
from megatrain.stream.ranks.own_gradients import OwnGradients
from megatrain.stream.ranks.shared_gradients import SharedGradients


class Gradients:
    """The gradients of one step. The methods named after operations are what these operations run."""

    def __init__(
        self,
        lanes: Lanes,
        host: HostState,
        buffers: GradientBuffers,
        shared: OwnGradients,
    ) -> None:
        """Begin without any; `buffers` is their memory, `shared` what this rank keeps of them."""
        self.shared = shared
        self._lanes = lanes
        self._host = host
        self.buffers = buffers
        self.is_filled = [False] * buffers.num_buffers
        """By buffer of the ring: whether it holds a part of its block's gradient."""
        self.run_sums = RunSums(len(host.blocks))
        self.homes = [Home.NONE] * len(host.blocks)
        self._is_home = [False] * len(host.blocks)
        self.present: list[set[str]] = [set() for _ in host.blocks]
        """By block: the parameters with a gradient; an exchange adds those of other ranks when it runs."""
        self.next_staging = 0
        """The host buffer through which the next gradient passes that its update uses up at once."""
        self.splits = host.precision is Precision.BF16
        """Sums are wider than complete gradients."""
        self._names = [[entry.name for entry in layout.trained] for layout in host.layouts]

    def clear(self) -> None:
        """Forget the step's gradients."""
        self.homes = [Home.NONE] * len(self.homes)
        self._is_home = [False] * len(self.homes)
        self.is_filled = [False] * self.buffers.num_buffers
        self.present = [set() for _ in self.present]  # what is enqueued keeps those of its step
        self.run_sums.clear()

    @property
    def blocks(self) -> list[int]:
        """Blocks that have a gradient in this step, in block order."""
        return [block for block, home in enumerate(self.homes) if home is not Home.NONE]

    def has(self, block: int) -> bool:
        """Whether an earlier backward of this step left a gradient of the block."""
        return self.homes[block] is not Home.NONE

    def still_at(self, home: Home) -> list[int]:
        """List the blocks whose sum is at `home` and has not been rounded into the gradient plane."""
        return [block for block, at in enumerate(self.homes) if at is home and not self._is_home[block]]

    # -- in the backward's visits ---------------------------------------------------------------------------

    def collect(self, operation: BlockPass, grads: Sequence[Tensor | None]) -> None:
        """Put one backward's gradients of a streamed block, or a part of them, into its gradient buffer."""
        block, buffer = operation.block, operation.gradient_buffer
        visit, (_, writes) = operation.visit, operation.touched()
        self._lanes.begin(Lane.COMPUTE, writes=writes)
        try:
            adds, height = self._sum_of(block, buffer, visit.micro_batch, self.is_filled[buffer])
            self.is_filled[buffer] = True
            views = self.buffers.views(block, buffer, is_sum=not operation.is_single, height=height)
            # nothing is what a negative zero adds: what the host adds to stays as it is, its zeros too
            missing = -0.0 if visit.sums_on_host else 0.0
            self._note_present(block, views.put(grads, adds=adds, missing=missing))
        finally:
            self._lanes.end(Lane.COMPUTE, writes=writes)

    def collect_resident(self, block: int, micro_batch: int, grads: Sequence[Tensor | None]) -> None:
        """Put one backward's gradients of a resident block into its own fp32 buffer."""
        with self._lanes.using(Lane.COMPUTE, writes=[("resident_gradient", block)]):
            adds, height = self._sum_of(block, -1, micro_batch, self.has(block))
            views = self.buffers.views(block, -1, is_sum=True, height=height)
            self._note_present(block, views.put(grads, adds=adds))
        self.homes[block] = Home.DEVICE
        self._is_home[block] = False

    @contextmanager
    def adding(self, block: int, micro_batch: int, operation: BlockPass | None) -> Iterator[list[Tensor]]:
        """Let a micro-batch's gradients of a whole block be added to its sum by whoever makes them.

        Args:
            block: The block.
            micro_batch: The number of the micro-batch within the round.
            operation: The visit of the backward; None: the block is resident.

        Yields:
            The fp32 sums of the trained parameters, zeros where nothing was there.
        """
        buffer = -1 if operation is None else operation.gradient_buffer
        writes = [gradients_buffer(block, buffer)]
        with self._lanes.using(Lane.COMPUTE, writes=writes):
            is_there = self.has(block) if buffer < 0 else self.is_filled[buffer]
            adds, height = self._sum_of(block, buffer, micro_batch, is_there)
            views = self.buffers.views(block, buffer, is_sum=True, height=height)
            if not adds:
                torch._foreach_zero_([*views.gradients, *views.padding])
            yield views.gradients
        self.present[block].update(self._names[block])
        if buffer < 0:
            self.homes[block], self._is_home[block] = Home.DEVICE, False
        else:
            self.is_filled[buffer] = True

    def _sum_of(self, block: int, buffer: int, micro_batch: int, adds: bool) -> tuple[bool, int]:
        """Return whether a gradient adds to what is there, and the height of its sum in the stack."""
        if not self.has_runs:
            return adds, 0
        adds = self.run_sums.enter(block, micro_batch, partial(self.buffers.sums, block, buffer))
        return adds, self.run_sums.top(block)

    def leave_round(self, block: int, gradient_buffer: int = -1) -> None:
        """Join the partial sums of a block that no later backward of the round passes."""
        with self._lanes.using(Lane.COMPUTE, writes=[gradients_buffer(block, gradient_buffer)]):
            self.run_sums.leave(block, partial(self.buffers.sums, block, gradient_buffer))
        if gradient_buffer >= 0:
            self.is_filled[gradient_buffer] = True
        else:
            self.homes[block] = Home.DEVICE

    def leave_residents(self) -> None:
        """Join the partial sums of blocks on the device: of all, where other ranks may have gradients."""
        if not self.has_runs:
            return
        blocks = self.still_at(Home.DEVICE) if self.shared.ranks.size == 1 else range(len(self.homes))
        for block in blocks:
            if self.buffers.is_resident(block) and block not in self.run_sums.summed:
                self.leave_round(block)

    def round_residents(self) -> None:
        """Round the sums of blocks on the device to the working dtype, as those of others are at home."""
        for block in self.still_at(Home.DEVICE):
            with self._lanes.using(Lane.COMPUTE, writes=[gradients_buffer(block, -1)]):
                self.round_in_place(block)

    def prepare(self, *, adds_up: bool, num_rounds: int, kept: SumRoom | None = None) -> None:
        """Make room for a step's gradients; waits for whoever uses the ring only if it has to grow.

        Args:
            adds_up: Gradients of several micro-batches add up, in a round or over rounds.
            num_rounds: The number of rounds of the step.
            kept: Room for partial sums that are kept between rounds; None: these are not foreseen together.
        """
        buffers = self.buffers
        if kept is None:
            sums = StepSums(Runs(), (1,) * num_rounds, on_drives=buffers.sums_on_drives)
            kept = sums.between(is_wide=self.splits)
        if buffers.needs_room(adds_up=adds_up, num_rounds=num_rounds, kept=kept):
            ring = [("gradient_buffer", index) for index in range(buffers.num_buffers)]
            with self._lanes.using(Lane.CALLER, writes=ring):
                buffers.prepare(adds_up=adds_up, num_rounds=num_rounds, kept=kept)

    # -- operations -----------------------------------------------------------------------------------------

    @property
    def has_runs(self) -> bool:
        """Whether the gradients of a step add up in more than one run, of this rank or of others."""
        return self.run_sums.runs.number * self.shared.ranks.size > 1

    def exchange(self, operation: ExchangeSums) -> Work:
        """Return what makes a sum that of all ranks, in this rank's share of the block (exchange lane)."""
        assert isinstance(self.shared, SharedGradients)
        place = block, _ = operation.block, operation.gradient_buffer
        sums = self.buffers.sums(*place), self.buffers.shared_sums(*place)
        present, completes = self.present[block], operation.completes
        return partial(
            self.shared.exchange, block, *sums, present, joined=operation.sums, completes=completes
        )

    def waits(self, block: int) -> bool:
        """Whether a block's gradient waits on the device."""
        return self.homes[block] is Home.WAITING

    def is_in_plane(self, block: int) -> bool:
        """Whether a block's gradient, or its sum, is in a plane on the host."""
        return self.homes[block] in (Home.GRADIENT, Home.ACCUMULATOR)

    def unparked(self, block: int, staging: int) -> tuple[Operation, int]:
        """Return the read of a complete gradient from the drives, and the bytes that go on to the device."""
        size = BlockSize.of(
            self._host.layouts[block].sizes, is_streamed=True, on_device=False, optimizer=self._host.optimizer
        )
        return unparked(block, size, staging), size.offload_bytes

    def load(self, operation: Load) -> Work:
        """Return the copy of what earlier backwards added up into a gradient buffer, as fp32 (fetch lane)."""
        self.is_filled[operation.gradient_buffer] = True
        state = self._host.blocks[operation.block]
        edge = state.layout.num_split
        if self.has_runs:
            return partial(self._lanes.copy, *self._both_ends(operation))
        flat = self.buffers.sums(operation.block, operation.gradient_buffer)
        if operation.waiting >= 0:
            sources = split_gradient(self.buffers.waiting(operation.block), state.layout)
        elif self.homes[operation.block] is Home.PARKED_SUM:
            sum_ = self.buffers.staged_sum(operation.block, operation.staging)
            sources = sum_[:edge], sum_[edge:]
        elif operation.staging >= 0:
            sources = split_gradient(self.home(operation.block, operation.staging), state.layout)
        elif self.homes[operation.block] is Home.ACCUMULATOR:
            sources = state.sum[:edge], state.sum[edge:]
        else:
            assert state.gradient is not None
            sources = split_gradient(state.gradient, state.layout)

        def copy() -> None:
            for part, source in zip((flat[:edge], flat[edge:]), sources, strict=True):
                self._lanes.copy(part, source)

        return copy

    def offload(self, operation: Offload) -> None:
        """Copy a gradient home, and sum the squares of what is complete on the way (offload lane)."""
        block, gradient_buffer = operation.block, operation.gradient_buffer
        layout = self._host.layouts[block]
        buffer = self.buffers.buffer(block, gradient_buffer)
        if operation.is_single:
            sent = buffer[: layout.gradient_bytes]
            self._lanes.copy(self.home(block, operation.staging), sent)
            self.shared.sum_squares(block, split_gradient(sent, layout))
        elif self.stays_wide(completes=operation.completes):
            here, there = self._both_ends(operation)
            self._lanes.copy(there, here)
            return
        else:
            flat = self.buffers.sums(block, gradient_buffer)
            self.shared.keep(block, flat, self._own_part(block, operation.staging))
        if gradient_buffer >= 0:  # a resident block's sum stays, for a backward that may follow
            self._lanes.freed(buffer)

    def deliver(self, block: int, gradient_buffer: int, staging: int) -> None:
        """Copy the gradient of one micro-batch to where the host adds it to others (offload lane)."""
        buffer = self.buffers.buffer(block, gradient_buffer)
        gradient = buffer[: self._host.layouts[block].gradient_bytes]
        self._lanes.copy(self.buffers.staging(block, staging), gradient)
        self._lanes.freed(buffer)

    def _both_ends(self, operation: Load | Offload) -> tuple[Tensor, Tensor]:
        """View the partial sums that are copied, on the device and on the host: (sums, numel) in fp32."""
        block, sums = operation.block, operation.sums
        here = self.buffers.partial_sums(block, operation.gradient_buffer, sums, is_share=operation.is_share)
        if operation.staging >= 0:
            return here, self.buffers.staged_sum(block, operation.staging)[None]
        return here, self._host.blocks[block].sums(sums, here.shape[1])

    def hold(self, block: int, gradient_buffer: int, *, is_single: bool) -> None:
        """Round a gradient to the working dtype where it waits, and sum its squares (offload lane)."""
        if gradient_buffer < 0:
            self.round_on_device(block)
            return
        place, parts = self.buffers.waiting(block), self.buffers.parts(block)
        buffer = self.buffers.buffer(block, gradient_buffer)
        if is_single:
            place.copy_(buffer[: len(place)])
            self.shared.sum_squares(block, parts)
        else:
            self.shared.hold(block, self.buffers.sums(block, gradient_buffer), parts)
        self._lanes.freed(buffer)

    def take_home(self, block: int, staging: int, *, waits: bool) -> None:
        """Copy a gradient into its staging buffer, from its own place if it `waits` there (offload lane)."""
        sources = self.buffers.parts(block) if waits else self._own_sums(block, -1)
        for part, source in zip(self._own_part(block, staging), sources, strict=True):
            self.shared.send(source, part)  # rounded before, so this changes nothing
        if waits:
            self._lanes.freed(self.buffers.waiting(block))

    def _own_sums(self, block: int, gradient_buffer: int) -> tuple[Tensor, Tensor]:
        """View the sums of what this rank keeps of a block's gradient: bf16 parameters', and fp32 ones'."""
        flat = self.buffers.sums(block, gradient_buffer)
        share = self.buffers.shares[block]
        return flat[share.split.start : share.split.stop], flat[share.full.start : share.full.stop]

    def _own_part(self, block: int, staging: int) -> Sequence[Tensor]:
        """View the same of a complete gradient at home."""
        layout, share = self._host.layouts[block], self.buffers.shares[block]
        return part_of_plane(layout, "gradient", self.home(block, staging), share)

    def home(self, block: int, staging: int = -1) -> Tensor:
        """Return the (gradient_bytes,) host bytes of a complete gradient.

        They are of its staging buffer or of the gradient plane, or, without one, new: rounded from fp32 sums.
        """
        state = self._host.blocks[block]
        if staging >= 0:
            return self.buffers.staging(block, staging)
        if state.gradient is not None:
            return state.gradient
        rounded = torch.empty(state.layout.gradient_bytes, dtype=torch.uint8)
        round_into(split_gradient(rounded, state.layout), state.sum)
        return rounded

    def round_on_device(self, block: int) -> None:
        """Round a resident block's sum to the working dtype where it is, and sum its squares."""
        self.shared.round(block, self.buffers.sums(block))

    def round_in_place(self, block: int) -> None:
        """Round a resident block's sum to the working dtype where it is."""
        low = self.buffers.sums(block)[: self._host.layouts[block].num_split]
        low.copy_(low.to(torch.bfloat16))

    def release_plane(self) -> None:
        """Give the memory of the gradient plane back until it is written again (host lane)."""
        self._host.planes.drop_gradients()

    def empty(self, gradient_buffer: int) -> None:
        """Note that a buffer of the ring, if it is one, holds nothing from now on."""
        if gradient_buffer >= 0:
            self.is_filled[gradient_buffer] = False

    def settle_offload(self, operation: Offload) -> None:
        """Note where an offload puts a block's gradient."""
        self._settle(operation.block, operation.gradient_buffer, Home.GRADIENT, completes=operation.completes)

    def settle_held(self, block: int, gradient_buffer: int, *, completes: bool) -> None:
        """Note that a block's gradient waits on the device."""
        self._settle(block, gradient_buffer, Home.WAITING, completes=completes)

    def _settle(self, block: int, gradient_buffer: int, complete: Home, *, completes: bool) -> None:
        self.empty(gradient_buffer)
        wide = self.stays_wide(completes=completes)
        if gradient_buffer >= 0:
            self.homes[block] = Home.ACCUMULATOR if wide else complete
        self._is_home[block] = not wide

    def settle_used(self, block: int, staging: int) -> None:
        """Note that an update uses a gradient up, which has come through a staging buffer, if it has."""
        self.homes[block] = Home.UPDATED
        self.next_staging = (staging + 1) % max(1, self.buffers.num_staging)

    def add(self, block: int, staging: int, *, completes: bool) -> Work:
        """Return the addition of a gradient that has come home to the sum of those before it (host lane)."""
        pool = default_pool()
        state, is_rounded = self._host.blocks[block], self.homes[block] is not Home.ACCUMULATOR
        layout, plane = state.layout, state.gradient
        assert plane is not None
        gradient = split_gradient(self.buffers.staging(block, staging), layout)
        out = sums = split_gradient(plane, layout)
        if self.splits:
            sums = state.sum[: layout.num_split], state.sum[layout.num_split :]
        parts = [part for part in zip(gradient, sums, out, strict=True) if part[0].numel()]

        def work() -> None:
            if is_rounded and sums is not out:  # a backward that was not foreseen follows a complete gradient
                for _, total, rounded in parts:
                    total.copy_(rounded)
            if self.stays_wide(completes=completes):
                for part, total, _ in parts:
                    add(pool, part, total)
            else:
                self.shared.note_squares(block, sum(add_last(pool, *part) for part in parts))

        return work

    def settle_sum(self, block: int, *, completes: bool) -> None:
        """Note where an addition leaves a block's gradient."""
        wide = self.stays_wide(completes=completes)
        self.homes[block] = Home.ACCUMULATOR if wide else Home.GRADIENT
        self._is_home[block] = not wide

    def complete_on_host(self, block: int, staging: int) -> None:
        """Round a gradient from the accumulator into the gradient plane, if there is one (host lane).

        A sum in a staging buffer, from drives, is rounded into that plane, or else in the buffer.
        """
        pool, state = default_pool(), self._host.blocks[block]
        if staging >= 0:
            parts = self.buffers.round_staged(block, staging)
        elif state.gradient is None:
            parts = split_gradient(self.home(block), state.layout)
        else:
            parts = split_gradient(state.gradient, state.layout)
            round_into(parts, state.sum)
        self.shared.note_squares(block, sum(sum_of_squares(pool, part) for part in parts))

    def settle_on_host(self, block: int, staging: int) -> None:
        """Note that a gradient is rounded into the gradient plane, or for the copy back to the drives."""
        if staging >= 0:
            self.homes[block] = Home.GRADIENT
        self._is_home[block] = True

    def park(self, block: int, staging: int, *, completes: bool) -> Work:
        """Return the write of a gradient, or of a sum, to the drives."""
        return self.buffers.parked.park(
            block, self.buffers.staging_buffer(staging), is_sum=self.stays_wide(completes=completes)
        )

    def unpark(self, block: int, staging: int, *, completes: bool) -> Work:
        """Return the read of a gradient, or of a sum, from the drives."""
        return partial(
            self.buffers.parked.unpark,
            block,
            self.buffers.staging_buffer(staging),
            is_sum=self.stays_wide(completes=completes),
        )

    def settle_parked(self, block: int, *, completes: bool) -> None:
        """Note that a gradient, or a sum, waits on the drives."""
        self.homes[block] = Home.PARKED_SUM if self.stays_wide(completes=completes) else Home.PARKED

    def is_parked(self, block: int, *, completes: bool) -> bool:
        """Whether a gradient, or a sum, waits on the drives."""
        wanted = Home.PARKED_SUM if self.stays_wide(completes=completes) else Home.PARKED
        return self.homes[block] is wanted

    def sums(self, blocks: Sequence[int]) -> list[float]:
        """Return the sum of squares of the gradients of `blocks`, which must be complete."""
        return self.shared.sums(blocks)

    def held(self, blocks: Iterable[int], *, leave: Collection[int]) -> list[int]:
        """List those of `blocks` whose complete gradients wait on the device, but for those in `leave`."""
        if not self.buffers.waits:
            return []
        places = (Home.WAITING, Home.DEVICE)
        return [block for block in blocks if self.homes[block] in places and block not in leave]

    @property
    def parked(self) -> list[int]:
        """Blocks whose gradients wait on drives."""
        return [block for block, home in enumerate(self.homes) if home is Home.PARKED]

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield those of `names` that have a gradient, as (name, fp32 host tensor); fp32 ones are views."""
        for name in names:
            places = [(n, entry) for n, entry in self._host.places(name) if name in self.present[n]]
            if places:
                parts = [self._gradient(*place) for place in places]
                yield name, parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gradient(self, block: int, entry: Entry) -> Tensor:
        """Return one complete gradient as an fp32 host tensor, from wherever it is."""
        state = self._host.blocks[block]
        home = self.homes[block] if self.buffers.waits else Home.GRADIENT
        if home is Home.GRADIENT:
            return state.gradient_of(entry).to(torch.float32)
        if self.shared.ranks.size > 1:
            raise ConfigError(
                f"gradients={'nvme' if home is Home.PARKED else 'device'} lets each rank keep its share of a "
                "gradient, so none has all of it to read; use gradients=host, or one rank"
            )
        if home is Home.WAITING:
            found = state.gradient_of(entry, self.buffers.waiting(block))
        elif home is Home.PARKED:
            found = state.gradient_of(entry, self.buffers.parked.read(block, is_sum=False))
        else:
            if home is Home.PARKED_SUM:
                sums = self.buffers.parked.read(block, is_sum=True).view(torch.float32)
            else:
                sums = self.buffers.sums(block) if home is Home.DEVICE else state.sum
            found = state.plane_of(sums, entry).to(entry.dtype)
        return found.to("cpu", torch.float32)

    def stays_wide(self, *, completes: bool) -> bool:
        """Whether what is left is a sum that is wider than a complete gradient, or is one of ranks."""
        return not completes and (self.splits or self.has_runs)

    def _note_present(self, block: int, given: Sequence[int]) -> None:
        names = self._names[block]
        self.present[block].update(names if len(given) == len(names) else [names[n] for n in given])
