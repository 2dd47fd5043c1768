"""The planes of model state on the host, and the one way to read and write a parameter's fp32 value.

| plane | bytes per parameter | who has it |
|---|---|---|
| working | 2 (bf16) or 4 (fp32) | every parameter; this is what a device fetches |
| remainder | 2 | trained bf16 parameters: with working it is the fp32 master, bit for bit |
| the optimizer's own | as it says | trained parameters, once there is an optimizer |
| gradient | 2 or 4 | trained parameters, from the backward until the update |
| accumulator | 4 | trained bf16 parameters, only in steps of several rounds |
| staging | 2 or 4, of a few blocks | gradients used up at once, that wait elsewhere, or are added up here |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import accumulate, groupby
from typing import TypeAlias

import torch
from torch import Tensor

from megatrain.config.choice import read_member
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.runs import SumRoom
from megatrain.errors import CapacityError
from megatrain.hardware import GIB, host_memory
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.blocks import BlockLayout, Entry
from megatrain.store.arena import Arena
from megatrain.store.master import join_master, split_master_into

SharedMemory: TypeAlias = Callable[[int], int | None]
"""Returns a descriptor of zeroed memory of so many bytes, which every rank of the node gets in its turn."""

_OWN = frozenset({"accumulator", "staging", "staging of weights", "paged"})
"""Planes of which every rank has its own: its part of the sums, and weights that it reads from drives."""


class Precision(str, Enum):
    """How weights are kept: `fp32` is its own master; `bf16` is a split fp32 master."""

    FP32 = "fp32"
    BF16 = "bf16"


def read_precision(name: str) -> Precision:
    """Return the precision of that name.

    Raises:
        ConfigError: There is none.
    """
    return read_member(Precision, name, "precision")


_FIELDS = frozenset({"working", "remainder", "gradient", "accumulator"})
"""Planes that a block has whatever the optimizer is."""


class BlockState:
    """One block's views into the planes: flat, indexed by its state space if not said otherwise.

    None where a block has nothing in a plane, and before the plane is allocated.
    """

    def __init__(self, layout: BlockLayout, working: Tensor) -> None:
        """Wrap the block's working bytes, (layout.working_bytes,) uint8; other planes come later."""
        self.layout = layout
        self.working = working
        self.remainder: Tensor | None = None
        self.planes: dict[str, Tensor] = {}
        """The optimizer's, by name."""
        self.gradient: Tensor | None = None
        self.accumulator: Tensor | None = None
        self.entries = {entry.name: entry for entry in layout.entries}

    def set_plane(self, name: str, plane: Tensor | None) -> None:
        """Put a plane in its place; None: it is gone."""
        if name in _FIELDS:
            setattr(self, name, plane)
        elif plane is not None:
            self.planes[name] = plane
        else:
            vars(self).get("planes", {}).pop(name, None)

    def find_plane(self, name: str) -> Tensor | None:
        """Return a plane; None where the block has nothing in it, or has it on drives."""
        found: Tensor | None = (vars(self) if name in _FIELDS else vars(self).get("planes", {})).get(name)
        return found

    @property
    def updated_planes(self) -> dict[str, Tensor]:
        """Return what updates change beside the working weights: remainder and optimizer's planes."""
        return ({} if self.remainder is None else {"remainder": self.remainder}) | self.planes

    def weight(self, entry: Entry) -> Tensor:
        """View a parameter's working weight, in its shape and working dtype."""
        return view_entry(self.working, entry)

    def remainder_of(self, entry: Entry) -> Tensor | None:
        """View a parameter's remainder, in its shape; None where the working weight is the whole value."""
        if self.remainder is None or entry.dtype != torch.bfloat16 or entry.state_offset is None:
            return None
        return self.remainder[entry.state_offset : entry.state_offset + entry.numel].view(entry.shape)

    def plane_of(self, plane: Tensor, entry: Entry) -> Tensor:
        """View a parameter's part of a plane of one element per state index, in the parameter's shape."""
        assert entry.state_offset is not None
        return plane[entry.state_offset : entry.state_offset + entry.numel].view(entry.shape)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """View what is kept of each trained parameter, remainder included, under `plane/parameter`.

        In the parameter's shape; scales are flat.
        """
        views, scales = {}, self.layout.scale_ranges
        for plane, tensor in self.updated_planes.items():
            has_scales = tensor.numel() != self.layout.num_state
            for entry in self.layout.trained:
                if plane != "remainder" and has_scales:
                    views[f"{plane}/{entry.name}"] = tensor[slice(*scales[entry.name])]
                elif plane != "remainder" or entry.dtype == torch.bfloat16:
                    views[f"{plane}/{entry.name}"] = self.plane_of(tensor, entry)
        return views

    def sums(self, places: range, numel: int) -> Tensor:
        """View partial sums of so many elements in the accumulator: (sums, numel) in fp32."""
        assert self.accumulator is not None
        return self.accumulator[places.start * numel : places.stop * numel].view(len(places), numel)

    @property
    def sum(self) -> Tensor:
        """View the one sum of a gradient that the accumulator holds without runs: (num_state,) in fp32."""
        return self.sums(range(1), self.layout.num_state)[0]

    def gradient_of(self, entry: Entry, plane: Tensor | None = None) -> Tensor:
        """View a parameter's gradient in the gradient plane's bytes (or in `plane`, laid out alike)."""
        plane = self.gradient if plane is None else plane
        assert plane is not None
        return view_gradient(plane, self.layout, entry)

    def master(self, entry: Entry) -> Tensor:
        """Return a parameter's fp32 value in a new tensor of its shape."""
        weight = self.weight(entry)
        remainder = self.remainder_of(entry)
        if remainder is None:
            return weight.to(torch.float32, copy=True)
        return join_master(weight, remainder)


def write_value(block: BlockState, entry: Entry, value: Tensor, region: tuple[int | slice, ...] = ()) -> None:
    """Write `value` into `region` of a parameter (empty: all of it), splitting an fp32 master exactly."""
    weight, remainder = block.weight(entry), block.remainder_of(entry)
    if region:
        weight = weight[region]
        remainder = None if remainder is None else remainder[region]
    if remainder is None:
        weight.copy_(value)
    elif value.dtype == torch.bfloat16:
        weight.copy_(value)
        remainder.zero_()
    else:
        master = value.to(torch.float32).reshape(weight.shape)
        if weight.is_contiguous():
            split_master_into(master.contiguous().view(-1), weight.view(-1), remainder.view(-1))
            return
        for part, low, source in zip(weight, remainder, master, strict=True):
            flat = torch.empty(source.numel(), dtype=torch.bfloat16)
            rest = torch.empty(source.numel(), dtype=torch.int16)
            split_master_into(source.contiguous().view(-1), flat, rest)
            part.copy_(flat.view(source.shape))
            low.copy_(rest.view(source.shape))


def view_entry(block_bytes: Tensor, entry: Entry) -> Tensor:
    """View one parameter in a block's working bytes, on whichever device they are."""
    flat = block_bytes[entry.byte_offset : entry.byte_offset + entry.nbytes]
    return flat.view(entry.dtype).view(entry.shape)


def view_gradient(plane: Tensor, layout: BlockLayout, entry: Entry) -> Tensor:
    """View one gradient in a block's gradient bytes: (2 B * num_split) then (4 B * the rest)."""
    assert entry.state_offset is not None
    if entry.dtype == torch.bfloat16:
        start = 2 * entry.state_offset
    else:
        start = 2 * layout.num_split + 4 * (entry.state_offset - layout.num_split)
    return plane[start : start + entry.nbytes].view(entry.dtype).view(entry.shape)


def split_gradient(plane: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """View a block's gradient bytes as its bf16 part, (num_split,), and its fp32 part."""
    edge = 2 * layout.num_split
    return plane[:edge].view(torch.bfloat16), plane[edge : layout.gradient_bytes].view(torch.float32)


class HostState:
    """All planes of all blocks. One arena per plane, of exact size, allocated when it is first needed."""

    def __init__(
        self, layouts: Sequence[BlockLayout], precision: Precision, *, shared: SharedMemory | None = None
    ) -> None:
        """Allocate the working plane, and the remainder plane where there is one.

        Args:
            layouts: The layouts of the blocks.
            precision: The precision in which weights are kept.
            shared: The function that makes memory which all ranks map, where several keep one state, each a
                share of it; None: this one is alone.
        """
        self.precision = precision
        self._shared = shared
        self.optimizer = DEFAULT
        """The optimizer whose planes are allocated, once they are."""
        self.layouts = tuple(layouts)
        self.digests: dict[str, bytes] = {}
        """Of weights that an engine has given back, by name; see `digests`."""
        self._arenas: dict[str, Arena] = {}
        self._staging: list[Tensor] = []
        self.sum_room = SumRoom()
        """For partial sums, in the accumulator plane."""
        self.blocks = self._make_blocks()
        self._owner = {entry.name: (block, entry) for block in self.blocks for entry in block.layout.entries}
        self._number = {entry.name: number for number, lay in enumerate(layouts) for entry in lay.entries}
        if precision is Precision.BF16:
            self._attach("remainder", pools.remainder_plane, [lay.num_split for lay in layouts], torch.int16)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: a copied model's parameters are its own, no views of this memory."""
        return type(None), ()

    def allocate_planes(self, optimizer: Optimizer) -> None:
        """Allocate the optimizer's planes, all zero."""
        for name in self.optimizer.planes:  # of an earlier one, which may have had others
            self.release(name)
        self.optimizer = optimizer
        sizes = [layout.sizes for layout in self.layouts]
        for name, plane in optimizer.planes.items():
            size_of = partial(pools.optimizer_plane, plane=name, optimizer=optimizer)
            numels = [plane.numel(each.num_state, each.num_scales) for each in sizes]
            self._attach(name, size_of, numels, getattr(torch, plane.element))

    def allocate_gradients(self, blocks: Collection[int]) -> None:
        """Allocate the gradient plane of some blocks if it is not there."""
        if "gradient" not in self._arenas:
            here = set(blocks)
            numels = [lay.gradient_bytes if n in here else 0 for n, lay in enumerate(self.layouts)]
            self._attach("gradient", pools.gradient_plane, numels, torch.uint8)

    def allocate_accumulators(self, room: SumRoom = pools.ONE_SUM, limit: int | None = None) -> None:
        """Allocate the fp32 accumulator plane if it is not there, or too small.

        Args:
            room: The room for partial sums of each gradient.
            limit: The number of bytes that the whole state may take; None: what the machine has.

        Raises:
            CapacityError: There is no room for it.
        """
        if self.sum_room.holds(room):
            return
        self.release("accumulator")
        need = sum(pools.accumulator_plane(layout.sizes, room) for layout in self.layouts)
        left = host_memory().available_bytes
        left = left if limit is None else min(left, limit - self.host_bytes)
        if need > left:
            raise CapacityError(
                f"host memory: adding up several micro-batches in bf16 takes {need / GIB:.2f} GiB more for "
                f"fp32 sums, but {left / GIB:.2f} GiB are left; use one larger micro-batch "
                "(train.grad_accumulation=1)"
            )
        size_of = partial(pools.accumulator_plane, room=room)
        numels = [size_of(layout.sizes) // 4 for layout in self.layouts]
        self._attach("accumulator", size_of, numels, torch.float32)
        self.sum_room = room

    def allocate_staging(self, num_buffers: int, nbytes: int) -> list[Tensor]:
        """Return buffers of so many bytes each, (nbytes,) uint8; the same ones until they are released."""
        if "staging" not in self._arenas:
            self._staging = self._allocate("staging", [nbytes] * num_buffers)
        assert [buffer.numel() for buffer in self._staging] == [nbytes] * num_buffers
        return self._staging

    def release_training(self) -> None:
        """Give back what training has taken beside the weights: planes of gradients, and the optimizer's."""
        for plane in [plane for plane in self._arenas if plane not in ("working", "remainder")]:
            self.release(plane)

    def release(self, plane: str) -> None:
        """Give a plane's memory back, if it is there."""
        self._arenas.pop(plane, None)
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
            if plane in self._arenas:
                self._arenas[plane].drop()

    def bring_gradients(self) -> None:
        """Make all complete gradients readable here, where several nodes keep them."""

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes of each plane and buffer allocated so far."""
        return {plane: arena.nbytes for plane, arena in self._arenas.items()}

    @property
    def host_bytes(self) -> int:
        """Bytes of all of these."""
        return sum(self.plane_bytes.values())

    def arena(self, plane: str) -> Arena | None:
        """Return a plane's arena, to lock its pages."""
        return self._arenas.get(plane)

    def find(self, name: str) -> tuple[BlockState, Entry]:
        """Return the block and the entry of a parameter by name."""
        return self._owner[name]

    def number_of(self, name: str) -> int:
        """Return the number of a parameter's block."""
        return self._number[name]

    @contextmanager
    def borrow(self, block: int, *, writes: bool = False) -> Iterator[BlockState]:
        """Lend a block with all its planes, wherever they live, until the context ends.

        Whoever reads state and is no operation of a lane reads it here, after `engine.settle()`.

        Args:
            block: The number of the block.
            writes: A claim that what the caller changes is kept; without it, the caller must change nothing.
        """
        yield self.blocks[block]

    def lend_working(self, block: int) -> Tensor:
        """Return a block's working bytes, (working_bytes,), to be read at once; as `borrow`."""
        return self.blocks[block].working

    def masters(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, fp32 value in a new tensor) lazily; names of one block should come together."""
        for number, group in groupby(names, key=self.number_of):
            with self.borrow(number) as block:
                for name in group:
                    yield name, block.master(block.entries[name])

    def has(self, name: str) -> bool:
        """Whether a parameter of this name is here."""
        return name in self._owner

    def names(self) -> Iterator[str]:
        """Yield the names of all parameters, block by block."""
        return iter(self._owner)

    def put(self, name: str, value: Tensor, region: tuple[int | slice, ...] = ()) -> None:
        """Write `value` into `region` of a parameter (empty: all of it), splitting an fp32 master exactly."""
        block, entry = self._owner[name]
        write_value(block, entry, value, region)

    def _make_blocks(self) -> list[BlockState]:
        """Allocate the working plane."""
        views = self._allocate("working", [pools.working_plane(layout.sizes) for layout in self.layouts])
        return [
            BlockState(layout, view[: layout.working_bytes])
            for layout, view in zip(self.layouts, views, strict=True)
        ]

    def _allocate(self, plane: str, sizes: Sequence[int]) -> list[Tensor]:
        """Allocate an arena; return parts of it, uint8, of so many bytes each."""
        nbytes = sum(sizes)
        file = self._shared(nbytes) if self._shared is not None and plane not in _OWN else None
        arena = Arena(nbytes, file)
        self._arenas[plane] = arena
        return [
            arena.view(torch.uint8, stop - size, size)
            for size, stop in zip(sizes, accumulate(sizes), strict=True)
        ]

    def _attach(
        self, plane: str, of: Callable[[BlockBytes], int], numels: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Allocate a plane: of each block as many bytes as a pool's function says, for so many elements."""
        is_here = [numel > 0 and self._is_here(plane, block) for block, numel in enumerate(numels)]
        sizes = [of(layout.sizes) if here else 0 for layout, here in zip(self.layouts, is_here, strict=True)]
        parts = zip(self.blocks, self._allocate(plane, sizes), numels, is_here, strict=True)
        for block, part, numel, here in parts:
            if here and numel:
                block.set_plane(plane, part[: numel * dtype.itemsize].view(dtype))

    def _is_here(self, plane: str, block: int) -> bool:
        """Whether a plane of a block is in RAM."""
        return True
