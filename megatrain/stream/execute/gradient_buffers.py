"""The memory of gradients: a ring of device buffers, places of blocks, and staging on the host.

Complete gradients that wait on the device or on drives until the norm is known take the place of the host's
gradient plane, 2 bytes per parameter in bf16: exact clipping then needs 12 bytes per parameter of host
memory. After the norm each passes through one of a few host buffers on its way to its update.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.config.choice import Choice
from megatrain.config.runs import SumRoom
from megatrain.layout import pools
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING
from megatrain.layout.ownership import Share
from megatrain.layout.totals import GradientPlaces, Residency
from megatrain.optim.device_sums import add_all, adds_by_kernel
from megatrain.store.block_state import split_gradient
from megatrain.store.drives.scratch import ScratchFiles
from megatrain.store.state import HostState
from megatrain.stream.execute.parked_gradients import ParkedGradients
from megatrain.stream.lanes import Lanes


class Views(NamedTuple):
    """A block's gradients in a buffer."""

    gradients: list[Tensor]
    """Of the trained parameters, in their shapes."""
    padding: list[Tensor]
    """What lies between them."""

    def put(self, grads: Sequence[Tensor | None], *, adds: bool, missing: float = 0.0) -> list[int]:
        """Put one backward's gradients in, or add them; return the places of those that there are.

        Args:
            grads: The gradients of the trained parameters; None: there is none, which adds `missing`, a zero.
            adds: Whether something is there to which they are added.
            missing: Zero or negative zero.
        """
        given = [number for number, grad in enumerate(grads) if grad is not None]
        targets = [self.gradients[number] for number in given]
        values = [grad for grad in grads if grad is not None]
        if not adds:
            for target, grad in zip(self.gradients, grads, strict=True):
                if grad is None:
                    target.fill_(missing)
        if adds and values:
            add_all(targets, values)
        elif values:
            torch._foreach_copy_(targets, values)
        if not adds and self.padding:
            torch._foreach_zero_(self.padding)
        return given


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
    PARKED = 6
    """On drives, likewise."""
    PARKED_SUM = 7
    """On drives, in fp32, until the next round."""


class GradientBuffers:
    """Buffers by number, and places by block."""

    def __init__(
        self,
        lanes: Lanes,
        host: HostState,
        choice: Choice,
        blocks: Residency,
        places: GradientPlaces,
        room: SumRoom,
        shares: Sequence[Share],
        scratch: ScratchFiles,
    ) -> None:
        """Allocate the places; the ring and what is on the host come with `prepare`.

        Args:
            lanes: The lanes in which things run.
            host: The model's state.
            choice: The choice, which says how many buffers the ring has, and what adds up where.
            blocks: The residency of the blocks: which stream, and which stay on the device.
            places: The places where complete gradients wait for the norm.
            room: The room for partial sums in a buffer; see `StepSums.on_device`.
            shares: The share of each block's complete gradient that this rank keeps.
            scratch: The room on drives for gradients that wait there.
        """
        self._lanes = lanes
        self._host = host
        self._blocks = blocks
        self.room = room
        """For partial sums in a buffer."""
        self.num_buffers = choice.num_gradient_buffers
        self.in_ram = frozenset(places.on_host)
        """Blocks whose complete gradients wait in the gradient plane."""
        self.waits = len(self.in_ram) < len(host.layouts)
        """Whether others' wait elsewhere."""
        self.num_staging = NUM_GRADIENT_STAGING if self.waits else 0
        """Host buffers that gradients pass if updates use them up at once, or some wait elsewhere."""
        self.is_staged = False
        """Whether this step's gradients pass through them: those of several rounds cannot."""
        self._ring: list[Tensor] = []
        self._staging: list[Tensor] = []
        self._views: dict[tuple[int, int, bool, int], Views] = {}
        self._places = places
        layouts = host.layouts
        self._resident = {
            block: lanes.allocate(pools.resident_gradient(layouts[block].sizes, room))
            for block in blocks.staying
            if layouts[block].num_state
        }
        waiting = places.on_device.total(pools.waiting_gradient, room.num_ranks)
        self._flat = lanes.allocate(waiting) if waiting else None
        sizes = [pools.waiting_gradient(layouts[block].sizes, room.num_ranks) for block in places.on_device]
        self._starts = dict(zip(places.on_device, accumulate(sizes, initial=0), strict=False))
        """By block, where its gradient waits there."""
        self.sums_on_drives = bool(places.sums_on_drives)
        """Whether sums of several rounds wait there."""
        self._adds_on_host = choice.sums == "host"
        adds_by_kernel(lanes.device)  # tried before the first step, which would wait for the trial
        self._adds_parts = choice.outer_streams
        self.shares = shares
        self.parked = ParkedGradients(scratch, layouts, shares, room.num_ranks)

    def needs_room(self, *, adds_up: bool, num_rounds: int, kept: SumRoom) -> bool:
        """Whether `prepare` would have to allocate something."""
        is_used_up = bool(self.num_staging) and not self.waits and num_rounds == 1
        self.is_staged = self.waits or is_used_up
        self._has_plane = bool(self.in_ram) and not is_used_up
        passes_sums = self._adds_on_host or self.sums_on_drives
        self._has_staging = self.is_staged or (passes_sums and num_rounds > 1)
        planes = ["staging"] * self._has_staging + ["gradient"] * self._has_plane
        if not self._host.planes.sum_room.holds(kept):
            return True
        return self._ring_bytes(adds_up=adds_up) > (self._ring[0].numel() if self._ring else 0) or any(
            self._host.arena(plane) is None for plane in planes
        )

    def prepare(self, *, adds_up: bool, num_rounds: int, kept: SumRoom) -> None:
        """Allocate what a step needs: the gradient plane or staging buffers, the ring, and fp32 room.

        Args:
            adds_up: Gradients of several micro-batches add up, in a round or over rounds.
            num_rounds: Rounds of the step.
            kept: Room for partial sums that are kept between them, beside complete gradients.

        Raises:
            CapacityError: The device has no room for the ring, or the host none for the accumulator plane.
        """
        if self._has_staging:
            nbytes = pools.staging_buffer(self._places)
            if not (self.waits or self._adds_on_host or self.sums_on_drives):
                nbytes = self._blocks.on_host.largest(pools.gradient_staging)
            self._staging = self._host.planes.allocate_staging(NUM_GRADIENT_STAGING, nbytes)
        if self._has_plane:
            self._host.planes.allocate_gradients(self.in_ram)
        if not self._host.planes.sum_room.holds(kept):
            self._lanes.unlock(self._host.arena("accumulator"))
            self._host.planes.release("accumulator")
            self._host.planes.allocate_accumulators(kept, self._host.bytes_left, set(self._blocks.on_host))
        for plane in ("gradient", "accumulator", "staging"):
            self._lanes.lock(self._host.arena(plane))
        need = self._ring_bytes(adds_up=adds_up)
        if not need or (self._ring and self._ring[0].numel() >= need):
            return
        self._lanes.free(self._ring)
        self._ring = []
        self._views.clear()
        self._ring = [self._lanes.allocate(need) for _ in range(self.num_buffers)]

    def release(self) -> None:
        """Give the device memory back."""
        flat = [] if self._flat is None else [self._flat]
        self._lanes.free([*self._ring, *self._resident.values(), *flat])
        self._ring, self._resident, self._staging, self._flat = [], {}, [], None
        self._views.clear()
        self.parked.close()

    def is_resident(self, block: int) -> bool:
        """Whether a block's gradient adds up in a place of its own on the device."""
        return block in self._resident

    def buffer(self, block: int, gradient_buffer: int) -> Tensor:
        """Return the uint8 buffer with a block's gradient: one of the ring, or its own if that is -1."""
        return self._resident[block] if gradient_buffer < 0 else self._ring[gradient_buffer]

    def sums(self, block: int, gradient_buffer: int = -1, height: int = 0) -> Tensor:
        """View such a buffer as the (num_state,) fp32 sums of a block; `height`: of a later partial sum."""
        num_state = self._host.layouts[block].num_state
        start = 4 * num_state * height
        return self.buffer(block, gradient_buffer)[start : start + 4 * num_state].view(torch.float32)

    def stack(self, block: int, gradient_buffer: int) -> Tensor:
        """View such a buffer as the (sums, num_state) fp32 partial sums of a block."""
        num_state = self._host.layouts[block].num_state
        buffer = self.buffer(block, gradient_buffer)[: 4 * num_state * self.room.whole]
        return buffer.view(torch.float32).view(self.room.whole, num_state)

    def shared_sums(self, block: int, gradient_buffer: int) -> Tensor:
        """View this rank's shares of partial sums behind them: (sums, shards of rows, numel) in fp32."""
        shape = self.room.shares, self.room.sequence, self.shares[block].numel
        start = 4 * self._host.layouts[block].num_state * self.room.whole
        buffer = self.buffer(block, gradient_buffer)[start : start + 4 * prod(shape)]
        return buffer.view(torch.float32).view(shape)

    def partial_sums(self, block: int, gradient_buffer: int, sums: range, *, is_share: bool) -> Tensor:
        """View partial sums, or shares of them, by their places in the stack: (sums, numel) in fp32."""
        stack = self.shared_sums if is_share else self.stack
        return stack(block, gradient_buffer).flatten(1)[sums.start : sums.stop]

    def views(self, block: int, gradient_buffer: int, *, is_sum: bool, height: int = 0) -> Views:
        """View a block's gradients in such a buffer: fp32 sums, or each in its own dtype."""
        key = block, gradient_buffer, is_sum, height
        if key not in self._views:
            state = self._host.blocks[block]
            layout = state.layout
            if is_sum:
                flat = self.sums(block, gradient_buffer, height)
                gradients = [state.plane_of(flat, entry) for entry in layout.trained]
                low, full = flat[: layout.num_split], flat[layout.num_split :]
            else:
                flat = self.buffer(block, gradient_buffer)
                gradients = [state.gradient_of(entry, flat) for entry in layout.trained]
                low, full = split_gradient(flat, layout)
            edge = layout.num_split
            padding = [
                low[start:stop] if start < edge else full[start - edge : stop - edge]
                for start, stop in layout.padding
            ]
            self._views[key] = Views(gradients, padding)
        return self._views[key]

    def waiting(self, block: int) -> Tensor:
        """Return the uint8 place in which a streamed block's gradient, or this rank's share of it, waits."""
        assert self._flat is not None
        start = self._starts[block]
        return self._flat[start : start + self.shares[block].sizes.gradient_bytes]

    def parts(self, block: int) -> tuple[Tensor, Tensor]:
        """View that place as its bf16 part and its fp32 part."""
        place, edge = self.waiting(block), 2 * len(self.shares[block].split)
        return place[:edge].view(torch.bfloat16), place[edge:].view(torch.float32)

    def staging_buffer(self, number: int) -> Tensor:
        """Return a whole staging buffer, (bytes,) uint8."""
        return self._staging[number]

    def staging(self, block: int, number: int) -> Tensor:
        """Return the (gradient_bytes,) uint8 part of a staging buffer that a block uses."""
        return self._staging[number][: self._host.layouts[block].gradient_bytes]

    def staged_sum(self, block: int, staging: int) -> Tensor:
        """View a staging buffer as the (num_state,) fp32 sum of a block that is on its way."""
        nbytes = 4 * self._host.layouts[block].num_state
        return self._staging[staging][:nbytes].view(torch.float32)

    def round_staged(self, block: int, staging: int) -> tuple[Tensor, Tensor]:
        """Round a sum in a staging buffer into the gradient plane, or there if this has no such gradient."""
        state = self._host.blocks[block]
        rounded = torch.empty(state.layout.gradient_bytes, dtype=torch.uint8)
        round_into(split_gradient(rounded, state.layout), self.staged_sum(block, staging))
        target = state.gradient if block in self.in_ram else self.staging(block, staging)
        assert target is not None
        return split_gradient(target.copy_(rounded), state.layout)

    def _ring_bytes(self, *, adds_up: bool) -> int:
        return self._blocks.streamed.largest(pools.gradient_buffer, adds_up or self._adds_parts, self.room)


def round_into(parts: tuple[Tensor, Tensor], sums: Tensor) -> None:
    """Copy fp32 sums into the two parts of a complete gradient, rounded to their types."""
    for part, own in zip(parts, sums.split([part.numel() for part in parts]), strict=True):
        part.copy_(own)
