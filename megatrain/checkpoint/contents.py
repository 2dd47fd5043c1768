"""The large files of a checkpoint, described before any of their values is read.

A file is a header and tensors without holes, so that every byte of it has an owner: a group of tensors that
are read together, such as a block's state. What is written while training goes on is cut by bytes, and each
piece knows which blocks must not change before it has been copied.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """Tensors that are read together."""

    blocks: frozenset[int]
    """The numbers of the blocks whose state they are; none of what never changes."""
    read: Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
    """Lends the tensors by their names in the file, on the host, as long as the context lasts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The bytes of one tensor in a file."""

    key: str
    """The name of the tensor, in its file and in its group."""
    begin: int
    """The byte of the file at which it begins."""
    num_bytes: int
    """Its size."""
    group: Group
    """What it is read with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The bytes `[start, stop)` of a tensor, and where they lie in a chunk."""

    place: Place
    start: int
    stop: int
    at: int


class LargeFile:
    """One file: its header, and the places of its tensors."""

    def __init__(self, name: str, header: bytes, places: Sequence[Place]) -> None:
        """Describe a file; the places, in any order, follow the header and each other without holes."""
        self.name = name
        self.header = header
        self.places = sorted(places, key=lambda place: place.begin)
        self.num_bytes = len(header)
        for place in self.places:
            if place.num_bytes:
                assert place.begin == self.num_bytes, f"{name} has a hole before {place.key}"
            self.num_bytes += place.num_bytes
        self._begins = [place.begin for place in self.places]

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Yield what of the tensors lies in the bytes `[start, stop)` of the file."""
        for place in self.places[max(0, bisect_right(self._begins, start) - 1) :]:
            if place.begin >= stop:
                return
            first, last = max(start, place.begin), min(stop, place.begin + place.num_bytes)
            if first < last:
                yield Part(place=place, start=first - place.begin, stop=last - place.begin, at=first - start)


class Lent:
    """A group's tensors, read when the first part is asked for, and given back after the last one."""

    def __init__(self, group: Group) -> None:
        """Expect parts, which `add` counts."""
        self._group = group
        self._num_left = 0
        self._lock = threading.Lock()
        self._context: AbstractContextManager[Mapping[str, Tensor]] | None = None
        self._tensors: dict[str, Tensor] = {}

    def add(self) -> None:
        """Count a part that will be asked for."""
        self._num_left += 1

    def bytes_of(self, part: Part) -> Any:
        """View a part as bytes; the caller copies them, and then calls `done`."""
        import torch

        key = part.place.key
        with self._lock:
            if self._context is None:
                context = self._group.read()
                self._tensors, self._context = dict(context.__enter__()), context
            # what has to be copied to lie in one piece is copied once, and not for each of its parts
            tensor = self._tensors[key] = self._tensors[key].detach().cpu().contiguous()
        assert tensor.nbytes == part.place.num_bytes, (
            f"{key} has {tensor.nbytes} bytes, announced as {part.place.num_bytes}"
        )
        return tensor.reshape(-1).view(torch.uint8).numpy()[part.start : part.stop]

    def done(self) -> None:
        """Count a part as copied; the last one gives the tensors back."""
        with self._lock:
            self._num_left -= 1
            if self._num_left:
                return
        self.close()

    def close(self) -> None:
        """Give the tensors back, whoever may still want them; nobody copies them."""
        with self._lock:
            context, self._context, self._tensors = self._context, None, {}
        if context is not None:
            context.__exit__(None, None, None)
