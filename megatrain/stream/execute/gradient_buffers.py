"""The memory of gradients: a ring of device buffers, places of blocks on the device, and staging on the host.

Complete gradients that wait on the device until the norm is known take the place of the host's gradient
plane, 2 bytes per parameter in bf16: exact clipping then needs 12 bytes per parameter of host memory. After
the norm each block's gradient passes through one of a few host buffers on its way to its update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.layout import pools
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING
from megatrain.layout.totals import Residency
from megatrain.store.state import HostState, Precision
from megatrain.stream.lanes import Lanes


class GradientBuffers:
    """Buffers by number, and places by block."""

    def __init__(
        self,
        lanes: Lanes,
        host: HostState,
        blocks: Residency,
        num_buffers: int,
        *,
        waits: bool = False,
        host_limit: int | None = None,
    ) -> None:
        """Allocate the places; the ring and what is on the host come with `prepare`.

        Args:
            lanes: Where things run.
            host: The model's state.
            blocks: Which stream, and which stay on the device.
            num_buffers: Buffers of the ring.
            waits: Complete gradients of streamed blocks wait on the device for the norm.
            host_limit: Bytes that the state may take on the host.
        """
        self._lanes = lanes
        self._host = host
        self._blocks = blocks
        self._host_limit = host_limit
        self.num_buffers = num_buffers
        self.waits = waits
        self.num_staging = NUM_GRADIENT_STAGING if waits else 0
        """Host buffers through which gradients pass if updates use them up at once, or they wait here."""
        self.is_staged = False
        """Whether this step's gradients pass through them: those of several rounds cannot."""
        self._ring: list[Tensor] = []
        self._staging: list[Tensor] = []
        layouts = host.layouts
        self._resident = {
            block: lanes.allocate(pools.resident_gradient(layouts[block].sizes))
            for block in blocks.staying
            if layouts[block].num_state
        }
        self._flat = lanes.allocate(blocks.streamed.total(pools.waiting_gradient)) if waits else None
        self._starts: dict[int, int] = {}
        """By block, where its gradient waits there."""
        start = 0
        for block in blocks.streamed:
            self._starts[block] = start
            start += pools.waiting_gradient(layouts[block].sizes)

    @property
    def holds_sums(self) -> bool:
        """Whether what goes on adding up waits on the device too: in fp32 it takes no more room."""
        return self.waits and self._host.precision is Precision.FP32

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

        Raises:
            CapacityError: The device has no room for the ring, or the host none for the accumulator plane.
        """
        if self._plane(num_rounds) == "staging":
            nbytes = self._blocks.on_host.largest(pools.gradient_staging)
            self._staging = self._host.allocate_staging(self.num_staging, nbytes)
        else:
            self._host.allocate_gradients()
        if self._is_wide(num_rounds > 1):
            self._host.allocate_accumulators(self._host_limit)
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
        flat = [] if self._flat is None else [self._flat]
        self._lanes.free([*self._ring, *self._resident.values(), *flat])
        self._ring, self._resident, self._staging, self._flat = [], {}, [], None

    def buffer(self, block: int, gradient_buffer: int) -> Tensor:
        """Return the uint8 buffer with a block's gradient: one of the ring, or its own if that is -1."""
        return self._resident[block] if gradient_buffer < 0 else self._ring[gradient_buffer]

    def sums(self, block: int, gradient_buffer: int = -1) -> Tensor:
        """View such a buffer as the (num_state,) fp32 sums of a block."""
        num_state = self._host.layouts[block].num_state
        return self.buffer(block, gradient_buffer)[: 4 * num_state].view(torch.float32)

    def waiting(self, block: int) -> Tensor:
        """Return the (gradient_bytes,) uint8 place in which a streamed block's gradient waits."""
        assert self._flat is not None
        start = self._starts[block]
        return self._flat[start : start + self._host.layouts[block].gradient_bytes]

    def staging(self, block: int, number: int) -> Tensor:
        """Return the (gradient_bytes,) uint8 part of a staging buffer that a block uses."""
        return self._staging[number][: self._host.layouts[block].gradient_bytes]

    def _plane(self, num_rounds: int) -> str:
        is_staged = self.waits or (self.num_staging and num_rounds == 1)
        return "staging" if is_staged else "gradient"

    def _is_wide(self, adds_up: bool) -> bool:
        return adds_up and self._host.precision is Precision.BF16

    def _ring_bytes(self, *, adds_up: bool) -> int:
        return self._blocks.streamed.largest(pools.gradient_buffer, self._is_wide(adds_up))
