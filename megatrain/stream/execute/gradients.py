"""Where a step's gradients are: from autograd into device buffers, home to the host, and their norm.

Gradients add up in fp32 and are rounded to the working dtype once, when they are complete. A gradient that
one backward of a streamed block makes alone is in the working dtype already and travels as it is. A
parameter for which autograd gave None in every round has no gradient and gets no update, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from megatrain.layout.blocks import BlockLayout, Entry
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING
from megatrain.optim.adamw import sum_of_squares
from megatrain.optim.pool import default_pool
from megatrain.plan.program.operations import Kind, Operation
from megatrain.store.state import HostState, Precision, split_gradient
from megatrain.stream.execute.waiting_gradients import WaitingGradients, staging_bytes
from megatrain.stream.lanes import Lanes


class Home(Enum):
    """Where the sum of a block's gradients of this step is: what another backward adds to."""

    NONE = 0
    GRADIENT = 1
    """In the gradient plane."""
    ACCUMULATOR = 2
    """In the fp32 accumulator plane."""
    DEVICE = 3
    """In the resident block's own fp32 buffer."""
    UPDATED = 4
    """Used up: the block was updated as soon as its gradient was complete."""
    WAITING = 5
    """On the device, in the working dtype, until the norm is known."""


class Gradients:
    """The gradients of one step. The methods named after operations are what these operations run."""

    def __init__(
        self,
        lanes: Lanes,
        host: HostState,
        streamed: Sequence[bool],
        num_buffers: int,
        *,
        on_device: Collection[int] = (),
        holds: bool = False,
    ) -> None:
        """Allocate the resident blocks' buffers; the ring of gradient buffers comes with `prepare`.

        Args:
            lanes: Where things run.
            host: The model's state.
            streamed: Which blocks stream.
            num_buffers: Buffers of the ring.
            on_device: Blocks that are updated on the device.
            holds: Complete gradients wait on the device for the norm.
        """
        self._lanes = lanes
        self._host = host
        self._streamed = list(streamed)
        self.num_buffers = num_buffers
        self.num_staging = NUM_GRADIENT_STAGING if holds else 0
        """Host buffers through which gradients pass if updates use them up at once, or they wait here."""
        self._staging_bytes = staging_bytes(host.layouts, on_device)
        self.waiting = WaitingGradients(lanes, host.layouts, streamed) if holds else None
        self.is_staged = False
        """Whether this step's gradients pass through them: those of several rounds cannot."""
        self._ring: list[Tensor] = []
        self._is_filled = [False] * num_buffers
        self._staging: list[Tensor] = []
        self._resident = {
            block: lanes.allocate(4 * layout.num_state)
            for block, layout in enumerate(host.layouts)
            if not streamed[block] and layout.num_state
        }
        self._sums = torch.zeros(len(host.blocks), dtype=torch.float64, device=lanes.device)
        self.homes = [Home.NONE] * len(host.blocks)
        self._is_home = [False] * len(host.blocks)
        self.present: list[set[str]] = [set() for _ in host.blocks]

    def needs_room(self, *, adds_up: bool, num_rounds: int) -> bool:
        """Whether `prepare` would have to allocate something."""
        self.is_staged = self._plane(num_rounds) == "staging"
        return self._ring_bytes(adds_up=adds_up) > (self._ring[0].numel() if self._ring else 0) or (
            self._host.arena(self._plane(num_rounds)) is None
            or (self._is_wide(num_rounds > 1) and self._host.arena("accumulator") is None)
        )

    def prepare(self, *, adds_up: bool, num_rounds: int) -> None:
        """Allocate what a step needs: the gradient plane or staging buffers, the ring, and fp32 room.

        Args:
            adds_up: Gradients of several micro-batches add up, in a round or over rounds.
            num_rounds: Rounds of the step; more than one need the accumulator plane in bf16.
        """
        if self._plane(num_rounds) == "staging":
            self._staging = self._host.allocate_staging(self.num_staging, self._staging_bytes)
        else:
            self._host.allocate_gradients()
        if self._is_wide(num_rounds > 1):
            self._host.allocate_accumulators()
        for plane in ("gradient", "accumulator", "staging"):
            self._lanes.lock(self._host.arena(plane))
        need = self._ring_bytes(adds_up=adds_up)
        if not need or (self._ring and self._ring[0].numel() >= need):
            return
        self._lanes.free(self._ring)
        self._ring = []
        self._ring = [self._lanes.allocate(need) for _ in range(self.num_buffers)]

    def release(self) -> None:
        """Give the device memory back."""
        self._lanes.free([*self._ring, *self._resident.values()])
        self._ring, self._resident, self._staging = [], {}, []
        if self.waiting is not None:
            self.waiting.release()

    def _plane(self, num_rounds: int) -> str:
        is_staged = self.waiting is not None or (self.num_staging and num_rounds == 1)
        return "staging" if is_staged else "gradient"

    @property
    def holds_sums(self) -> bool:
        """Whether what goes on adding up waits on the device too: in fp32 it takes no more room."""
        return self.waiting is not None and self._host.precision is Precision.FP32

    def _is_wide(self, adds_up: bool) -> bool:
        return adds_up and self._host.precision is Precision.BF16

    def _ring_bytes(self, *, adds_up: bool) -> int:
        return ring_bytes(self._host.layouts, self._streamed, wide=self._is_wide(adds_up))

    def clear(self) -> None:
        """Forget the step's gradients."""
        self.homes = [Home.NONE] * len(self.homes)
        self._is_home = [False] * len(self.homes)
        self._is_filled = [False] * self.num_buffers
        for names in self.present:
            names.clear()

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

    def collect(self, operation: Operation, grads: Sequence[Tensor | None]) -> None:
        """Put one backward's gradients of a streamed block into its gradient buffer (compute lane)."""
        adds = self._is_filled[operation.gradient_buffer]
        self._is_filled[operation.gradient_buffer] = True
        state = self._host.blocks[operation.block]
        layout = state.layout
        buffer = self._ring[operation.gradient_buffer]
        if operation.is_single:
            views = [state.gradient_of(entry, buffer) for entry in layout.trained]
            parts = split_gradient(buffer, layout)
        else:
            flat = buffer[: 4 * layout.num_state].view(torch.float32)
            views = [state.plane_of(flat, entry) for entry in layout.trained]
            parts = (flat[: layout.num_split], flat[layout.num_split :])
        _put(views, grads, adds=adds)
        if not adds:
            _zero_padding(parts, layout)
        self._mark(operation.block, grads)

    def collect_resident(self, block: int, grads: Sequence[Tensor | None]) -> None:
        """Put one backward's gradients of a resident block into its own fp32 buffer (compute lane)."""
        state = self._host.blocks[block]
        flat = self._resident[block].view(torch.float32)
        views = [state.plane_of(flat, entry) for entry in state.layout.trained]
        _put(views, grads, adds=self.has(block))
        if not self.has(block):
            _zero_padding((flat[: state.layout.num_split], flat[state.layout.num_split :]), state.layout)
        self.homes[block] = Home.DEVICE
        self._is_home[block] = False
        self._mark(block, grads)

    def is_filled(self, gradient_buffer: int) -> bool:
        """Whether a buffer of the ring holds a part of its block's gradient."""
        return self._is_filled[gradient_buffer]

    def load(self, operation: Operation) -> Callable[[], object]:
        """Return the copy of what earlier backwards added up into a gradient buffer, as fp32 (fetch lane)."""
        self._is_filled[operation.gradient_buffer] = True
        state = self._host.blocks[operation.block]
        edge = state.layout.num_split
        flat = self._ring[operation.gradient_buffer][: 4 * state.layout.num_state].view(torch.float32)
        if operation.waiting >= 0:
            assert self.waiting is not None
            sources = split_gradient(self.waiting.place(operation.block), state.layout)
        elif self.homes[operation.block] is Home.ACCUMULATOR:
            assert state.accumulator is not None
            sources = state.accumulator[:edge], state.accumulator[edge:]
        else:
            assert state.gradient is not None
            sources = split_gradient(state.gradient, state.layout)

        def copy() -> None:
            for part, source in zip((flat[:edge], flat[edge:]), sources, strict=True):
                part.copy_(source, non_blocking=True)

        return copy

    def offload(self, operation: Operation) -> None:
        """Copy a gradient home, and sum the squares of what is complete on the way (offload lane)."""
        state = self._host.blocks[operation.block]
        layout = state.layout
        home = self.home(operation)
        if operation.gradient_buffer < 0:
            buffer = self._resident[operation.block]
        else:
            buffer = self._ring[operation.gradient_buffer]
        if operation.is_single:
            sent = buffer[: layout.gradient_bytes]
            home.copy_(sent, non_blocking=True)
            self._lanes.sum_of_squares(split_gradient(sent, layout), self._sums[operation.block])
        else:
            flat = buffer[: 4 * layout.num_state].view(torch.float32)
            if self._stays_wide(operation):
                assert state.accumulator is not None
                state.accumulator.copy_(flat, non_blocking=True)
                return
            rounded = (flat[: layout.num_split].to(torch.bfloat16), flat[layout.num_split :])
            for plane, part in zip(split_gradient(home, layout), rounded, strict=True):
                plane.copy_(part, non_blocking=True)
            self._lanes.sum_of_squares(rounded, self._sums[operation.block])
        if operation.gradient_buffer >= 0:  # a resident block's sum stays, for a backward that may follow
            self._lanes.freed(buffer)

    def hold(self, operation: Operation) -> None:
        """Round a gradient to the working dtype where it waits, and sum its squares (offload lane)."""
        if operation.gradient_buffer < 0:
            self.round_on_device(operation.block)
            return
        assert self.waiting is not None
        layout = self._host.layouts[operation.block]
        buffer = self._ring[operation.gradient_buffer]
        place = self.waiting.place(operation.block)
        parts = split_gradient(place, layout)
        if operation.is_single:
            place.copy_(buffer[: layout.gradient_bytes])
        else:
            flat = buffer[: 4 * layout.num_state].view(torch.float32)
            for part, sums in zip(parts, (flat[: layout.num_split], flat[layout.num_split :]), strict=True):
                part.copy_(sums)
        self._lanes.sum_of_squares(parts, self._sums[operation.block])
        self._lanes.freed(buffer)

    def take_home(self, operation: Operation) -> None:
        """Copy a gradient that has waited into its staging buffer (offload lane)."""
        layout = self._host.layouts[operation.block]
        home = self.home(operation)
        if operation.waiting >= 0:
            assert self.waiting is not None
            place = self.waiting.place(operation.block)
            home.copy_(place, non_blocking=True)
            self._lanes.freed(place)
            return
        flat = self.on_device(operation.block)
        for part, sums in zip(
            split_gradient(home, layout), (flat[: layout.num_split], flat[layout.num_split :]), strict=True
        ):
            part.copy_(sums.to(part.dtype), non_blocking=True)  # rounded before, so this changes nothing

    def home(self, operation: Operation) -> Tensor:
        """Return the (gradient_bytes,) host bytes of a complete gradient.

        They are of its staging buffer or of the gradient plane, or, without one, new: rounded from fp32 sums.
        """
        state = self._host.blocks[operation.block]
        if operation.staging >= 0:
            return self._staging[operation.staging][: state.layout.gradient_bytes]
        if state.gradient is not None:
            return state.gradient
        assert state.accumulator is not None
        rounded = torch.empty(state.layout.gradient_bytes, dtype=torch.uint8)
        _round_into(split_gradient(rounded, state.layout), state.accumulator)
        return rounded

    def on_device(self, block: int) -> Tensor:
        """Return the (num_state,) fp32 sum of a resident block, on the device."""
        return self._resident[block].view(torch.float32)

    def round_on_device(self, block: int) -> None:
        """Round a resident block's sum to the working dtype where it is, and sum its squares."""
        edge = self._host.layouts[block].num_split
        flat = self.on_device(block)
        low, full = flat[:edge], flat[edge:]
        rounded = low.to(torch.bfloat16)
        low.copy_(rounded)
        self._lanes.sum_of_squares((rounded, full), self._sums[block])

    def settle(self, operation: Operation) -> None:
        """Note where an offload puts a block's gradient."""
        if operation.gradient_buffer >= 0:
            self._is_filled[operation.gradient_buffer] = False
        wide = self._stays_wide(operation)
        if operation.gradient_buffer >= 0:
            complete = Home.WAITING if operation.kind is Kind.HOLD else Home.GRADIENT
            self.homes[operation.block] = Home.ACCUMULATOR if wide else complete
        self._is_home[operation.block] = not wide

    def complete_on_host(self, block: int) -> None:
        """Round a gradient from the accumulator into the gradient plane, if there is one (host lane)."""
        state = self._host.blocks[block]
        assert state.accumulator is not None
        if state.gradient is None:
            parts = split_gradient(self.home(Operation(kind=Kind.UPDATE, block=block)), state.layout)
        else:
            parts = split_gradient(state.gradient, state.layout)
            _round_into(parts, state.accumulator)
        pool = default_pool()
        self._sums[block] = sum(sum_of_squares(pool, part) for part in parts)

    def settle_on_host(self, block: int) -> None:
        """Note that a gradient is rounded into the gradient plane."""
        self._is_home[block] = True

    def settle_update(self, block: int) -> None:
        """Note that an update uses up a block's gradient."""
        self.homes[block] = Home.UPDATED

    def sums(self, blocks: Sequence[int]) -> list[float]:
        """Return the sum of squares of the gradients of `blocks`, which must be complete."""
        values = self._sums.tolist()
        return [values[block] for block in blocks]

    def held(self, blocks: Iterable[int], *, leave: Collection[int]) -> list[int]:
        """List those of `blocks` whose complete gradients wait on the device, but for those in `leave`."""
        if self.waiting is None:
            return []
        places = (Home.WAITING, Home.DEVICE)
        return [block for block in blocks if self.homes[block] in places and block not in leave]

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield those of `names` that have a gradient, as (name, fp32 host tensor); fp32 ones are views."""
        owner = {name: block for block, present in enumerate(self.present) for name in present}
        for name in names:
            if name in owner:
                yield name, self._gradient(owner[name], self._host.find(name)[1])

    def _gradient(self, block: int, entry: Entry) -> Tensor:
        """Return one complete gradient as an fp32 host tensor, from wherever it is."""
        state = self._host.blocks[block]
        if self.waiting is None:
            return state.gradient_of(entry).to(torch.float32)
        if self.homes[block] is Home.WAITING:
            found = state.gradient_of(entry, self.waiting.place(block))
        else:
            sums = self.on_device(block) if self.homes[block] is Home.DEVICE else state.accumulator
            assert sums is not None
            found = state.plane_of(sums, entry).to(entry.dtype)
        return found.to("cpu", torch.float32)

    def _stays_wide(self, operation: Operation) -> bool:
        return not operation.completes and self._host.precision is Precision.BF16

    def _mark(self, block: int, grads: Sequence[Tensor | None]) -> None:
        for entry, grad in zip(self._host.layouts[block].trained, grads, strict=True):
            if grad is not None:
                self.present[block].add(entry.name)


def ring_bytes(layouts: Sequence[BlockLayout], streamed: Sequence[bool], *, wide: bool) -> int:
    """Return the bytes of one gradient buffer of the ring: the largest streamed block's gradient."""
    return max(
        (
            4 * layout.num_state if wide else layout.gradient_bytes
            for layout, flag in zip(layouts, streamed, strict=True)
            if flag
        ),
        default=0,
    )


def _put(views: Sequence[Tensor], grads: Sequence[Tensor | None], *, adds: bool) -> None:
    pairs = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None]
    if adds:
        for view, grad in pairs:
            view.add_(grad)
        return
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
    for view, missing in zip(views, grads, strict=True):
        if missing is None:
            view.zero_()


def _round_into(parts: tuple[Tensor, Tensor], sums: Tensor) -> None:
    edge = parts[0].numel()
    parts[0].copy_(sums[:edge])
    parts[1].copy_(sums[edge:])


def _zero_padding(parts: tuple[Tensor, Tensor], layout: BlockLayout) -> None:
    low, full = parts
    for start, stop in layout.padding:
        if start < layout.num_split:
            low[start:stop].zero_()
        else:
            full[start - layout.num_split : stop - layout.num_split].zero_()
