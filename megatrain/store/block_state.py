"""One block's state on the host: its views into the planes, and the parts of them that belong to a parameter.

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

import sys
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatrain.layout.blocks import BlockLayout, Entry
from megatrain.layout.decoding import decoding_scratch
from megatrain.layout.encoding import Scratch
from megatrain.layout.ownership import Share
from megatrain.store.master import join_master, split_master, split_master_into

_GRADIENTS = frozenset({"gradient", "accumulator"})
"""The planes of a block that hold no state."""


class BlockState:
    """One block's views into the planes: flat, indexed by its state space if not said otherwise.

    None where a block has nothing in a plane, and before the plane is allocated.
    """

    def __init__(self, layout: BlockLayout, working: Tensor, *, is_here: bool = True) -> None:
        """Wrap the block's working bytes, (layout.kept_bytes,) uint8; other planes come later.

        Args:
            layout: The layout of the block.
            working: The working bytes, or addresses where they will be.
            is_here: The other planes of its image are in memory; otherwise `HostState.borrow` brings them.
        """
        self.layout = layout
        self.working = working
        self._planes: dict[str, Tensor] | None = {} if is_here else None
        self.gradient: Tensor | None = None
        self.accumulator: Tensor | None = None
        self.entries = {entry.name: entry for entry in layout.entries}

    @property
    def planes(self) -> dict[str, Tensor]:
        """The planes that updates change beside the working weights: the remainder, and the optimizer's."""
        assert self._planes is not None, "the planes of the block are on the drives; use HostState.borrow"
        return self._planes

    @property
    def remainder(self) -> Tensor | None:
        """The 16 bits under each bf16 weight."""
        return self.planes.get("remainder")

    def set_plane(self, name: str, plane: Tensor | None) -> None:
        """Put a plane in its place; None: it is gone."""
        if name in _GRADIENTS:
            setattr(self, name, plane)
        elif plane is not None:
            self.planes[name] = plane
        elif self._planes:
            self._planes.pop(name, None)

    def find_plane(self, name: str) -> Tensor | None:
        """Return a plane; None where the block has nothing in it, or has it on drives."""
        fields = vars(self) if name == "working" or name in _GRADIENTS else self._planes or {}
        found: Tensor | None = fields.get(name)
        return found

    def weight(self, entry: Entry) -> Tensor:
        """View a parameter's working weight, in its shape and working dtype; an encoded one has no memory."""
        if entry.encoding is not None:
            return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return view_entry(self.working, entry)

    @property
    def codes(self) -> Tensor:
        """View what encoded parameters are made of: (codes_bytes,) uint8."""
        return self.working[self.layout.plain_bytes :]

    def remainder_of(self, entry: Entry) -> Tensor | None:
        """View a parameter's remainder, in its shape; None where the working weight is the whole value."""
        if self.remainder is None or entry.dtype != torch.bfloat16 or entry.state_offset is None:
            return None
        return self.plane_of(self.remainder, entry)

    def plane_of(self, plane: Tensor, entry: Entry) -> Tensor:
        """View a parameter's part of a plane of one element per state index, in the parameter's shape."""
        assert entry.state_offset is not None
        return plane[entry.state_offset : entry.state_offset + entry.numel].view(entry.shape)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """View what is kept of each trained parameter, remainder included, under `plane/parameter`.

        In the parameter's shape; scales are flat.
        """
        views, scales = {}, self.layout.scale_ranges
        for plane, tensor in self.planes.items():
            has_scales = tensor.numel() != self.layout.num_state
            for entry in self.layout.trained:
                if plane != "remainder" and has_scales:
                    views[f"{plane}/{entry.key}"] = tensor[slice(*scales[entry.name])]
                elif plane != "remainder" or entry.dtype == torch.bfloat16:
                    views[f"{plane}/{entry.key}"] = self.plane_of(tensor, entry)
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
        if entry.encoding is not None:
            return decoded(self.codes, entry).to(torch.float32)
        weight = self.weight(entry)
        remainder = self.remainder_of(entry)
        if remainder is None:
            return weight.to(torch.float32, copy=True)
        return join_master(weight, remainder)


def decoded(codes: Tensor, entry: Entry) -> Tensor:
    """Return the working weight that a block's codes make, in a new tensor where they are."""
    made = torch.empty(entry.shape, dtype=entry.dtype, device=codes.device)
    scratch = torch.empty(decoding_scratch(entry.numel), dtype=torch.uint8, device=codes.device)
    decode_into(made, codes, entry, Scratch(scratch))
    return made


def decode_into(out: Tensor, codes: Tensor, entry: Entry, scratch: Scratch) -> None:
    """Make an encoded parameter's working weight of its block's codes; `out` is its place, in its shape."""
    assert entry.encoding is not None
    entry.encoding.decode(entry.encoding.views(codes[entry.codes_offset :]), out, scratch)


def write_value(block: BlockState, entry: Entry, value: Tensor, region: tuple[int | slice, ...] = ()) -> None:
    """Write `value` into `region` of a parameter (empty: all of it), splitting an fp32 master exactly."""
    assert entry.encoding is None, f"{entry.name} is kept in codes"
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
            high, rest = split_master(source.contiguous())
            part.copy_(high)
            low.copy_(rest)


def part_of_region(
    rows: range, region: tuple[int | slice, ...], value: Tensor
) -> tuple[Tensor, tuple[int | slice, ...] | None]:
    """Return what of a value for a region of a parameter is for some of its rows, and the region there.

    Args:
        rows: The rows, of the parameter's first dimension.
        region: The region of the whole parameter; empty: all of it.
        value: The value.

    Returns:
        The part of the value, and its region among these rows; None: it has nothing for them.
    """
    first, *others = region or (slice(None),)
    if isinstance(first, int):
        return value, (first - rows.start, *others) if first in rows else None
    start, stop, _ = first.indices(sys.maxsize)
    begin, end = max(start, rows.start), min(stop, rows.stop)
    if begin >= end:
        return value, None
    own = (slice(begin - rows.start, end - rows.start), *others)
    return value[begin - start : end - start], own if region or end - begin < len(rows) else ()


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """View tensors that lie one after the other in one memory as one, along their first dimension."""
    first = parts[0]
    if len(parts) == 1:
        return first
    ends = accumulate(part.nbytes for part in parts)
    places = [first.data_ptr(), *(first.data_ptr() + end for end in ends)]
    assert [part.data_ptr() for part in parts] == places[:-1], "parts of a parameter do not adjoin"
    shape = sum(map(len, parts)), *first.shape[1:]
    return first.as_strided(shape, first.stride())


def view_entry(block_bytes: Tensor, entry: Entry) -> Tensor:
    """View one parameter in a block's working bytes, on the host or in its place on a device."""
    assert entry.encoding is None, f"{entry.name} is kept in codes"
    return view_place(block_bytes, entry)


def view_place(place: Tensor, entry: Entry) -> Tensor:
    """View one parameter in a block's place on a device, where it is a value however it is kept."""
    flat = place[entry.byte_offset : entry.byte_offset + entry.nbytes]
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


def part_of_plane(layout: BlockLayout, plane: str, whole: Tensor, share: Share) -> list[Tensor]:
    """View a share of a plane of a block: its bf16 parameters, and its others."""
    split, full = share.split, share.full
    if plane == "gradient":
        low, high = split_gradient(whole, layout)
        start = full.start - layout.num_split
        return [low[split.start : split.stop], high[start : start + len(full)] if full else high[:0]]
    if plane == "remainder":
        return [whole[split.start : split.stop]]
    if plane == "working":
        return [whole[layout.working_range(part)] for part in share.ranges]
    if whole.numel() != layout.num_state:  # of scales
        return [whole[layout.scales_of(part)] for part in share.ranges]
    return [whole[split.start : split.stop], whole[full.start : full.stop]]
