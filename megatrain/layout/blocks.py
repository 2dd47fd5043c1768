"""The places of a block's parameters in its flat buffers.

A block has one byte buffer of working weights, with one segment per working dtype, and one index space for
its trained elements, which `remainder`, `gradient` and the optimizer's planes share. Every parameter starts
at a multiple of `ALIGNMENT` elements, and what lies between two parameters is zero for ever: a zero weight
with a zero gradient stays zero under any optimizer that is described here, and adds nothing to a norm.

Frozen weights that are kept encoded come last: as values on the device, and on the host, behind the same
bytes, as codes and scales.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from megatrain.config.optimizers.optimizer import SCALE_NUMEL, num_scales
from megatrain.layout.block_bytes import ALIGNMENT, BlockBytes, aligned
from megatrain.layout.encoding import Encoding

_PART = re.compile(r"(.*)\[(\d+):(\d+)\]")
_SPAN = re.compile(r"(.*)\{(\d{1,18}):(\d{1,18})\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """The facts of a parameter that a layout needs."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The working dtype: what the device computes with."""
    is_trained: bool
    rows: range | None = None
    """The rows of the parameter, in its first dimension, that the block has; None: all of it."""
    encoding: Encoding | None = None
    """How it is kept on the host; None: as the values that the device computes with. It is frozen, if so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The place of one parameter, or of those of its rows that a block has."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    byte_offset: int
    """The byte of the block's place on the device at which the working weight starts; on the host too, if it
    is not encoded."""
    state_offset: int | None
    """First index in the block's state space; None for a frozen parameter."""
    rows: range | None = None
    """The rows of the parameter, in its first dimension, that are here; None: all of it."""
    encoding: Encoding | None = None
    """How it is kept on the host; None: as it is on the device."""
    codes_offset: int = 0
    """The byte of the block's codes at which those of an encoded parameter start."""

    @property
    def key(self) -> str:
        """Return a name that no other entry of a model has."""
        return self.name if self.rows is None else part_name(self.name, self.rows)

    @property
    def first_index(self) -> int:
        """Return the index in the whole parameter of the first element that is here."""
        return 0 if self.rows is None else self.rows.start * math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Return the number of elements, padding not counted."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the working weight, padding not counted."""
        return self.numel * self.dtype.itemsize


def part_name(name: str, rows: range) -> str:
    """Name a part of a parameter, or of a tensor of its state: some rows of its first dimension."""
    return f"{name}[{rows.start}:{rows.stop}]"


def split_part_name(name: str) -> tuple[str, range | None]:
    """Undo `part_name`; None: the name is that of a whole parameter."""
    found = _PART.fullmatch(name)
    return (name, None) if found is None else (found[1], range(int(found[2]), int(found[3])))


def span_name(name: str, elements: range) -> str:
    """Name some elements of a tensor of a parameter's state, which lie one after the other in it, flat."""
    return f"{name}{{{elements.start}:{elements.stop}}}"


def split_span_name(name: str) -> tuple[str, range | None]:
    """Undo `span_name`; None: the name is that of a tensor in its shape."""
    found = _SPAN.fullmatch(name)
    return (name, None) if found is None else (found[1], range(int(found[2]), int(found[3])))


@dataclass(frozen=True, kw_only=True)  # without slots: what follows from the entries is kept
class BlockLayout:
    """The flat layout of one block.

    Trained bf16 parameters come first in the state space, so the remainder plane, which only they have,
    covers `[0, num_split)` and the rest of the planes `[0, num_state)`.
    """

    entries: tuple[Entry, ...]
    sizes: BlockBytes

    @cached_property
    def working_bytes(self) -> int:
        """Return the bytes of the working weights on the device, padding included."""
        return self.sizes.working_bytes

    @cached_property
    def plain_bytes(self) -> int:
        """Return the bytes of those that are not encoded, with which the block begins everywhere."""
        return self.sizes.plain_bytes

    @cached_property
    def kept_bytes(self) -> int:
        """Return the bytes of the working weights on the host: these, and codes."""
        return self.sizes.kept_bytes

    @cached_property
    def encoded(self) -> tuple[Entry, ...]:
        """Return the parameters that are encoded on the host."""
        return tuple(entry for entry in self.entries if entry.encoding is not None)

    @cached_property
    def num_split(self) -> int:
        """Return the number of state elements of bf16 parameters, padding included: they have a remainder."""
        return self.sizes.num_split

    @cached_property
    def num_state(self) -> int:
        """Return the number of state elements in all, padding included."""
        return self.sizes.num_state

    @cached_property
    def gradient_bytes(self) -> int:
        """Return the bytes of the complete gradient: each parameter's in its working dtype."""
        return self.sizes.gradient_bytes

    @cached_property
    def trained(self) -> tuple[Entry, ...]:
        """Return the trained parameters, in state order."""
        return tuple(entry for entry in self.entries if entry.state_offset is not None)

    @cached_property
    def num_parameters(self) -> int:
        """Return the number of elements of all parameters, padding not counted."""
        return sum(entry.numel for entry in self.entries)

    def working_range(self, part: range) -> slice:
        """Return where a state range, of bf16 parameters or of fp32 ones, is in the working bytes."""
        is_split = part.start < self.num_split
        first = next(entry for entry in self.trained if is_split or entry.dtype == torch.float32)
        assert first.state_offset is not None
        size = first.dtype.itemsize
        start = first.byte_offset - first.state_offset * size
        return slice(start + part.start * size, start + part.stop * size)

    @cached_property
    def scale_ranges(self) -> dict[str, tuple[int, int]]:
        """Return where the scales of each trained parameter are in a block's scale planes: [start, stop)."""
        ranges, start = {}, 0
        for entry in self.trained:
            stop = start + num_scales(entry.numel)
            ranges[entry.name] = start, stop
            start = stop
        return ranges

    def scaled_edge(self, index: int) -> int:
        """Return where, from a state index on, a parameter or another scale of its planes begins."""
        entry = self._trained_at(index)
        start = entry.state_offset or 0
        return min(start + aligned(entry.numel), start + SCALE_NUMEL * num_scales(index - start))

    def scales_of(self, part: range) -> slice:
        """Return where the scales of a state range are, which lies between such edges."""
        if not part:
            return slice(0, 0)
        ends = []
        for edge in (part.start, part.stop):
            entry = self._trained_at(edge)
            first = self.scale_ranges[entry.name][0]
            ends.append(first + num_scales(edge - (entry.state_offset or 0)))
        return slice(*ends)

    def _trained_at(self, index: int) -> Entry:
        """Return the parameter of a state index, or the last one."""
        return self.trained[bisect_right(self.trained, index, key=lambda entry: entry.state_offset or 0) - 1]

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Return the state ranges `[start, stop)` between parameters."""
        gaps = []
        for entry in self.trained:
            assert entry.state_offset is not None
            stop = entry.state_offset + entry.numel
            if stop % ALIGNMENT:
                gaps.append((stop, entry.state_offset + aligned(entry.numel)))
        return tuple(gaps)


def lay_out(parameters: Iterable[ParameterSpec]) -> BlockLayout:
    """Place a block's parameters: trained bf16, frozen bf16, trained fp32, frozen fp32, each in given order.

    What is encoded comes after all of these.

    Raises:
        AssertionError: A working dtype is neither bf16 nor fp32, or a trained parameter is encoded.
    """
    specs = list(parameters)
    assert not any(spec.is_trained and spec.encoding is not None for spec in specs), (
        "what is encoded is frozen"
    )
    entries: list[Entry] = []
    byte = state = split = scales = 0
    for dtype in (torch.bfloat16, torch.float32):
        for is_trained in (True, False):
            for spec in specs:
                if spec.dtype != dtype or spec.is_trained != is_trained or spec.encoding is not None:
                    continue
                offset = state if is_trained else None
                entries.append(_entry(spec, byte, state_offset=offset))
                size = aligned(math.prod(spec.shape))
                byte += size * dtype.itemsize
                state += size if is_trained else 0
                scales += num_scales(size) if is_trained else 0
        split = state if dtype == torch.bfloat16 else split
    sizes = BlockBytes(working_bytes=byte, num_split=split, num_state=state, num_scales=scales)
    encoded, codes = _lay_out_encoded([spec for spec in specs if spec.encoding is not None], sizes)
    assert len(entries) + len(encoded) == len(specs), "a working dtype is bf16 or fp32"
    return BlockLayout(entries=(*entries, *encoded), sizes=sizes + codes)


def _lay_out_encoded(specs: Iterable[ParameterSpec], plain: BlockBytes) -> tuple[list[Entry], BlockBytes]:
    """Place encoded parameters behind the others; return them, and their bytes."""
    entries: list[Entry] = []
    decoded = codes = 0
    for spec in specs:
        assert spec.encoding is not None
        entries.append(_entry(spec, plain.working_bytes + decoded, codes_offset=codes))
        decoded += aligned(math.prod(spec.shape)) * spec.dtype.itemsize
        codes += spec.encoding.nbytes
    return entries, BlockBytes(working_bytes=decoded, decoded_bytes=decoded, codes_bytes=codes)


def _entry(
    spec: ParameterSpec, byte_offset: int, *, state_offset: int | None = None, codes_offset: int = 0
) -> Entry:
    return Entry(
        name=spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        byte_offset=byte_offset,
        state_offset=state_offset,
        rows=spec.rows,
        encoding=spec.encoding,
        codes_offset=codes_offset,
    )
