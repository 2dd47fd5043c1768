"""The memory of a state in RAM: one arena per plane, of exact size, allocated when it is first needed.

A block has a part of every plane but of those that the placement has put on the drives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.runs import SumRoom
from megatrain.errors import CapacityError
from megatrain.hardware import GIB
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.host_buffers import NUM_PAGES, NUM_STATE_STAGING, padded
from megatrain.store.arena import Arena
from megatrain.store.block_state import BlockState
from megatrain.store.placement import Placement
from megatrain.store.ranks import StateRanks

_OWN = frozenset({"accumulator", "staging", "staging of weights", "paged"})
"""Planes of which every rank has its own: its part of the sums, and weights that it reads from drives."""


class Planes:
    """The arenas of a state, and the views of its blocks into them."""

    on_write: Callable[[int | None], object] = staticmethod(lambda block: None)
    """Is called with a block to which something else than an update has written; None: any may be."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        placement: Placement,
        ranks: StateRanks,
        on_device: Collection[int] = (),
    ) -> None:
        """Allocate the working plane in RAM, and addresses without memory for weights on the drives.

        Args:
            layouts: The layouts of the blocks.
            placement: Which blocks have their state, and their weights, on the drives.
            ranks: The ranks that map one state; some planes each has for itself.
            on_device: The blocks whose state will be on the device and nowhere else: their planes here are
                apart from the others, and are never locked, so that their memory can be given back.
        """
        self.layouts = layouts
        self._placement = placement
        self._ranks = ranks
        self.optimizer = DEFAULT
        """The optimizer whose planes are allocated, once they are."""
        self.sum_room = SumRoom()
        """The room for partial sums, in the accumulator plane."""
        self.arenas: dict[str, Arena] = {}
        self.apart: dict[str, Arena] = {}
        """The memory of planes of blocks `on_device`, while these are here."""
        self._on_device = frozenset(on_device)
        self._parts_apart: dict[str, list[Tensor]] = {}
        """By plane and block: whole pages of that memory."""
        self._staging: list[Tensor] = []
        sizes = [pools.working_plane(layout.sizes) for layout in layouts]
        away = placement.working_on_drives
        there = self._allocate("paged", [n if b in away else 0 for b, n in enumerate(sizes)])
        here = self._allocate_parts("working", [0 if b in away else n for b, n in enumerate(sizes)])
        self.paged = self.arenas.pop("paged")
        self.blocks = [
            BlockState(
                layout,
                (there if number in away else here)[number][: layout.kept_bytes],
                is_here=number not in placement.state_on_drives,
            )
            for number, layout in enumerate(layouts)
        ]

    def allocate_remainder(self) -> None:
        """Allocate the remainder of trained bf16 parameters."""
        self._attach("remainder", pools.remainder_plane, [lay.num_split for lay in self.layouts], torch.int16)

    def allocate_optimizer(self, optimizer: Optimizer) -> None:
        """Allocate the optimizer's planes, all zero."""
        for name in self.optimizer.planes:  # of an earlier one, which may have had others
            self.release(name)
        self.optimizer = optimizer
        for name, plane in optimizer.planes.items():
            size_of = partial(pools.optimizer_plane, plane=name, optimizer=optimizer)
            numels = [plane.numel(lay.sizes.num_state, lay.sizes.num_scales) for lay in self.layouts]
            self._attach(name, size_of, numels, getattr(torch, plane.element))

    def allocate_gradients(self, blocks: Collection[int]) -> None:
        """Allocate the gradient plane of some blocks if it is not there.

        Raises:
            CapacityError: The placement has not counted on it.
        """
        if not self._placement.keeps_gradients:
            raise CapacityError(
                "host memory: the split between RAM and drives counts on optim.updates=immediate and one "
                "round per step, but gradients are to be kept; use keeps_gradients=True"
            )
        if "gradient" not in self.arenas:
            here = set(blocks)
            numels = [lay.gradient_bytes if n in here else 0 for n, lay in enumerate(self.layouts)]
            self._attach("gradient", pools.gradient_plane, numels, torch.uint8)

    def allocate_accumulators(self, room: SumRoom, left: int, blocks: Collection[int]) -> None:
        """Allocate the fp32 accumulator plane.

        Args:
            room: The room for partial sums of each gradient.
            left: The bytes that it may take.
            blocks: The blocks whose gradients add up there, or wait there between rounds.

        Raises:
            CapacityError: It takes more.
        """
        size_of = partial(pools.accumulator_plane, room=room)
        here = set(blocks)
        sizes = [size_of(layout.sizes) if n in here else 0 for n, layout in enumerate(self.layouts)]
        if sum(sizes) > left:
            raise CapacityError(
                f"host memory: adding up several micro-batches in bf16 takes {sum(sizes) / GIB:.2f} GiB more "
                f"for fp32 sums, but {left / GIB:.2f} GiB are left; use one larger micro-batch "
                "(train.grad_accumulation=1)"
            )
        self._attach("accumulator", size_of, [size // 4 for size in sizes], torch.float32)
        self.sum_room = room

    def allocate_staging(self, num_buffers: int, nbytes: int) -> list[Tensor]:
        """Return buffers of so many bytes each, (nbytes,) uint8; the same ones until they are released."""
        if "staging" not in self.arenas:
            self._staging = self._allocate("staging", [nbytes] * num_buffers)
        assert [buffer.numel() for buffer in self._staging] == [nbytes] * num_buffers
        return self._staging

    def allocate_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the buffers for state on its way to updates, and those for weights on their way out."""
        placed = self._placement.ram_bytes
        state, weights = (
            self._allocate(name, [placed[name] // count] * count) if name in placed else []
            for name, count in (("staging of state", NUM_STATE_STAGING), ("staging of weights", NUM_PAGES))
        )
        return state, weights

    def release_training(self) -> None:
        """Give back what training has taken beside the weights: planes of gradients, and the optimizer's."""
        for plane in [plane for plane in self.arenas if plane not in ("working", "remainder")]:
            self.release(plane)

    def release(self, plane: str) -> None:
        """Give a plane's memory back, if it is there."""
        self.arenas.pop(plane, None)
        self.apart.pop(plane, None)
        self._parts_apart.pop(plane, None)
        if plane == "accumulator":
            self.sum_room = SumRoom()
        if plane == "staging":
            self._staging = []
            return
        for block in self.blocks:
            block.set_plane(plane, None)

    def drop_gradients(self) -> None:
        """Give the gradient plane's pages back until they are written again."""
        for plane in ("gradient", "accumulator"):
            if plane in self.arenas:
                self.arenas[plane].drop()

    @property
    def apart_bytes(self) -> int:
        """Bytes of the planes of blocks that will be on the device, as they are before."""
        return sum(arena.nbytes for arena in self.apart.values())

    def arena_of(self, plane: str, block: int) -> Arena:
        """Return the memory that has a plane of a block."""
        return (self.apart if block in self._on_device and plane in self.apart else self.arenas)[plane]

    def give_back(self, block: int, planes: Iterable[str]) -> None:
        """Give the memory of some planes of a block back, whose state is on the device; addresses stay."""
        for name in planes:
            self.apart[name].give_back(self._parts_apart[name][block])

    def _allocate_parts(self, plane: str, sizes: Sequence[int]) -> list[Tensor]:
        """Allocate a plane of state as `_allocate`; that of blocks on the device apart from the others."""
        apart: list[Tensor] = []
        if self._on_device:
            nbytes = [padded(n) if b in self._on_device else 0 for b, n in enumerate(sizes)]
            apart = self._parts_apart[plane] = self._allocate(plane, nbytes)
            self.apart[plane] = self.arenas.pop(plane)
        here = self._allocate(plane, [0 if b in self._on_device else n for b, n in enumerate(sizes)])
        return [apart[b] if b in self._on_device else part for b, part in enumerate(here)]

    def _allocate(self, plane: str, sizes: Sequence[int]) -> list[Tensor]:
        """Allocate an arena; return parts of it, uint8, of so many bytes each."""
        nbytes = sum(sizes)
        file = None if plane in _OWN else self._ranks.shared_memory(nbytes)
        arena = self.arenas[plane] = Arena(nbytes, file)
        ends = accumulate(sizes)
        return [arena.view(torch.uint8, stop - size, size) for size, stop in zip(sizes, ends, strict=True)]

    def _attach(
        self, plane: str, of: Callable[[BlockBytes], int], numels: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Allocate a plane: of each block as many bytes as a pool's function says, for so many elements."""
        is_state = plane not in ("gradient", "accumulator")
        gone = self._placement.state_on_drives if is_state else ()
        allocate = self._allocate_parts if is_state else self._allocate
        here = [numel if block not in gone else 0 for block, numel in enumerate(numels)]
        sizes = [of(layout.sizes) if numel else 0 for layout, numel in zip(self.layouts, here, strict=True)]
        for block, part, numel in zip(self.blocks, allocate(plane, sizes), here, strict=True):
            if numel:
                block.set_plane(plane, part[: numel * dtype.itemsize].view(dtype))
