"""What autograd keeps in place of the tensors that it saves in a visit, and the bytes that these span."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from megatrain.layout.host_buffers import OFFLOAD_ALIGNMENT
from megatrain.plan.program.buffers import Buffer
from megatrain.stream.activations.host_ring import HostBuffer
from megatrain.stream.activations.on_drives import Staged
from megatrain.stream.lanes import Lanes

_MOST_SPANS = 1 << 16
"""Spans of a visit that have a name each."""


class Where(Enum):
    """Where the tensors of a visit are."""

    OPEN = "on the device; the forward is going on"
    LEAVING = "on the device and on their way to the host"
    STAYING = "on the device; the backward came before they were dropped"
    HOST = "on the host"
    ARRIVING = "on their way to the device"
    DEVICE = "on the device again"


@dataclass(eq=False)
class ByteSpan:
    """Bytes of one storage that a visit's tensors cover, from `start` to `stop`."""

    start: int
    stop: int
    offset: int = 0
    """Where the span is in the host buffer."""
    number: int = 0
    """Its place among the spans of its visit."""
    restored: Tensor | None = None
    """(nbytes,) uint8 on the device, once it is back."""

    @property
    def nbytes(self) -> int:
        """Length of the span."""
        return self.stop - self.start


@dataclass(eq=False)
class Held:
    """What autograd keeps in place of a saved tensor, for `OffloadedActivations.load`."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    """Bytes into its storage."""
    version: int
    """Of the tensor's content when it was saved."""
    tensor: Tensor | None
    """The tensor itself, while it is on the device."""
    visit: SavedVisit | None
    """None: it stays on the device for as long as autograd keeps it."""
    span: ByteSpan | None = None
    ahead: tuple[slice, Tensor] | None = None
    """Tokens that are on their way to the device before they are asked for."""

    @classmethod
    def of(cls, tensor: Tensor) -> Held:
        """Take note of a tensor on the device."""
        # Detached, or the node that saves its own output would keep itself alive. Shares the version counter.
        tensor = tensor.detach()
        is_strided = tensor.layout is torch.strided
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride() if is_strided else (),
            int(tensor.storage_offset()) * tensor.dtype.itemsize if is_strided else 0,
            tensor._version,
            tensor,
            None,
        )

    @property
    def is_intact(self) -> bool:
        """Whether the tensor on the device is still what was saved."""
        return self.tensor is not None and self.tensor._version == self.version

    @property
    def has_plain_rows(self) -> bool:
        """Whether some tokens of a row (rows, tokens, ...) are in memory one after the other."""
        steps = itertools.accumulate(self.shape[:1:-1], operator.mul, initial=1)
        return self.stride[:0:-1] == tuple(steps)

    def restored(self) -> Tensor:
        """View the tensor in the bytes that came back."""
        assert self.span is not None
        assert self.span.restored is not None
        return self.within(self.span.restored)

    def within(self, flat: Tensor) -> Tensor:
        """View the tensor in the bytes of its span: (nbytes,) uint8."""
        assert self.span is not None
        offset = int(flat.storage_offset()) + self.start - self.span.start
        tensor = torch.empty(0, dtype=self.dtype, device=flat.device)
        return tensor.set_(flat.untyped_storage(), offset // self.dtype.itemsize, self.shape, self.stride)


@dataclass(eq=False)
class SavedVisit:
    """The saved tensors of one key.

    Autograd owns them: it drops each `Held` when it is done with a node, and with the last `Held` of a span
    goes the span and its device memory. So a visit holds both weakly.
    """

    key: Hashable
    where: Where = Where.OPEN
    is_late: bool = False
    """Whether it leaves the device at once, and each tensor comes back when it is asked for, and no sooner: a
    long row's are too large to be there beside others."""
    saved: list[weakref.ref[Held]] = field(default_factory=list)
    spans: list[weakref.ref[ByteSpan]] = field(default_factory=list)
    host: HostBuffer | Staged | None = None
    what: str = ""
    """Names it, for messages of drives."""
    copied: list[Tensor] = field(default_factory=list)
    """Device memory that a copy lane still reads or writes."""
    coming: dict[Buffer, Tensor] = field(default_factory=dict)
    """Device memory to which tensors of a late visit come, for which compute does not wait yet, by name."""

    def helds(self) -> list[Held]:
        """List what autograd still keeps of the visit."""
        return [held for reference in self.saved if (held := reference()) is not None]

    @property
    def is_wanted(self) -> bool:
        """Whether autograd still holds one of the tensors."""
        return any(reference() is not None for reference in self.saved)

    def end(self) -> None:
        """Let go of all device memory."""
        self.copied, self.coming = [], {}
        for held in self.helds():
            if held.span is not None:
                held.span.restored = None
            held.tensor = held.span = held.ahead = None

    @property
    def buffer(self) -> HostBuffer:
        """The host buffer in which the visit's bytes are, or will be."""
        buffer = self.host.buffer if isinstance(self.host, Staged) else self.host
        assert buffer is not None
        return buffer

    @property
    def buffer_name(self) -> Buffer:
        """Name of that buffer, to the lanes."""
        return "offloaded", self.buffer.index

    def device_name(self, kind: str) -> list[Buffer]:
        """Name the visit's memory on the device: ("saved", n) and ("restored", n)."""
        assert self.host is not None
        return [(kind, self.host.index)]

    def name_of(self, span: ByteSpan) -> Buffer:
        """Name the device memory to which a span of a late visit comes, by itself."""
        assert self.host is not None
        return "coming", self.host.index * _MOST_SPANS + min(span.number, _MOST_SPANS - 1)

    def copy(self, lanes: Lanes, spans: Sequence[ByteSpan], *, home: bool) -> Callable[[], None]:
        """Return what copies spans to the host, or from there; `copied` has them on the device, in order."""
        flat = self.buffer.flat
        there = [flat[span.offset : span.offset + span.nbytes] for span in spans]
        pairs = list(zip(there, self.copied, strict=True))

        def run() -> None:
            for on_host, on_device in pairs:
                target, source = (on_host, on_device) if home else (on_device, on_host)
                lanes.copy(target, source)

        return run


def cover(helds: Iterable[Held]) -> dict[ByteSpan, Tensor]:
    """Find the spans that cover these tensors, each with its bytes, and tell each tensor its own.

    Tensors of one storage whose bytes overlap or touch share a span, so views and repeated saves are copied
    once. Spans start at aligned addresses, as their copies on the device do: for another alignment a kernel
    may add in another order.
    """
    storages: dict[int, list[Held]] = {}
    for held in helds:
        assert held.tensor is not None
        storages.setdefault(held.tensor.untyped_storage().data_ptr(), []).append(held)
    spans: dict[ByteSpan, Tensor] = {}
    for group in storages.values():
        assert group[0].tensor is not None
        storage = group[0].tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        found: list[ByteSpan] = []
        for held in sorted(group, key=lambda held: held.start):
            last = sum((size - 1) * step for size, step in zip(held.shape, held.stride, strict=True))
            stop = held.start + (last + 1) * held.dtype.itemsize
            if not found or held.start > found[-1].stop:
                found.append(ByteSpan(held.start // OFFLOAD_ALIGNMENT * OFFLOAD_ALIGNMENT, stop))
            found[-1].stop = max(found[-1].stop, stop)
            held.span = found[-1]
        spans |= {span: flat[span.start : span.stop] for span in found}
    return spans


def may_leave(tensor: Tensor, device: torch.device, min_bytes: int) -> bool:
    """Whether a saved tensor should leave the device.

    Not parameters. Not integers and bools: they are indices and masks, which blocks share. Not what is
    elsewhere already, nor subclasses and lazily negated views, whose bytes are not all that they are.
    """
    if isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter):
        return False
    tensor = tensor.detach()
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device == device
        and tensor.is_floating_point()
        and tensor.ndim > 0
        and tensor.numel() > 0
        and not tensor.is_neg()
        and tensor.untyped_storage().nbytes() >= min_bytes
    )
