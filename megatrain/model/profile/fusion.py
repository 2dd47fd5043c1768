"""A count of the device memory that operations read and write if a compiler fuses all that it can.

Between two operations that are kernels of their own (matrix products, attention, lookups, sorts) all others
form a group, as a compiler forms it: the group reads each tensor once that such a kernel has written, and
writes only what a later one reads. What another group reads is made there again, from what it was made of.
So a norm reads its input and writes what the projections read, and the copy in fp32 between costs nothing.

This is a count of bytes, not a compiler: a real one may write more, as where a group is too long for one
kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.model.profile.rows import Rows

_Source: TypeAlias = tuple[int, int]
"""The name of a tensor in memory, and the bytes that reading it takes."""

_aten = torch.ops.aten

_OWN = frozenset(
    (
        _aten.embedding,
        _aten.embedding_dense_backward,
        _aten.gather,
        _aten.index,
        _aten.index_add,
        _aten.index_put,
        _aten.index_select,
        _aten.nonzero,
        _aten.scatter,
        _aten.scatter_add,
        _aten.sort,
        _aten.topk,
        _aten.cumsum,
    )
)
"""Operations that are kernels of their own, beside products and attention."""


class Fusion:
    """Follows which tensors are in memory, and which are only made inside kernels."""

    def __init__(self, rows: Rows) -> None:
        """Follow nothing yet; `rows` says what of the bytes grows with a micro-batch."""
        self._rows = rows
        self._known: dict[int, tuple[StorageWeakRef, frozenset[_Source] | int]] = {}
        """The tensors by address, which a later storage may have again: the sources of one that no kernel has
        written yet, or the name of one that is in memory."""
        self._read: set[_Source] = set()
        """The sources that the group has read."""
        self._names = count()
        self.num_kernels = 0
        self._in_group = False

    def add(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor], *, is_own: bool) -> Any:
        """Return the bytes that an operation adds.

        Args:
            func: The operation.
            given: Tensors that it reads.
            made: Tensors that it makes.
            is_own: A claim that it is a product or attention, whose own traffic is part of its rate.
        """
        if is_own or func._overloadpacket in _OWN:
            written = self.write_all(given)
            touched = 0 if is_own else sum(self._touched(tensor) for tensor in (*given, *made))
            self._read.clear()
            self._in_group = False
            self.num_kernels += 1
            for tensor in made:
                self._put(tensor)
            return written + touched
        if not self._in_group:
            self._in_group = True
            self.num_kernels += 1
        parts = {_key(tensor): tensor for tensor in given if self._is_small_part(tensor)}
        written = sum(self._rows.of(tensor.untyped_storage().nbytes()) for tensor in parts.values())
        for tensor in parts.values():  # no kernel makes a whole for a part
            self._put(tensor)
        in_place = {_key(tensor) for tensor in given if isinstance(self._state(tensor), int)}
        sources = frozenset(pair for tensor in given for pair in self._sources(tensor))
        new = sources - self._read
        self._read |= new
        changed: Any = 0
        for tensor in made:
            if _key(tensor) in in_place:
                changed = changed + self._touched(tensor)
            else:
                self._note(tensor, sources)
        return written + changed + sum(self._rows.of(nbytes) for _, nbytes in new)

    def _is_small_part(self, tensor: Tensor) -> bool:
        """Whether an operation reads less than half of a tensor that no kernel has written yet."""
        is_small = 2 * touched_bytes(tensor) < tensor.untyped_storage().nbytes()
        return is_small and isinstance(self._state(tensor), frozenset)

    def write_all(self, tensors: Iterable[Tensor]) -> Any:
        """Put tensors into memory that are only made inside kernels so far; return the bytes written."""
        written: Any = 0
        for tensor in tensors:
            if isinstance(self._state(tensor), frozenset):
                self._put(tensor)
                written = written + self._touched(tensor)
        return written

    def _touched(self, tensor: Tensor) -> Any:
        return self._rows.of(touched_bytes(tensor))

    def _put(self, tensor: Tensor) -> None:
        self._note(tensor, next(self._names))

    def _note(self, tensor: Tensor, state: frozenset[_Source] | int) -> None:
        self._known[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), state

    def _state(self, tensor: Tensor) -> frozenset[_Source] | int:
        """Return what is known of a tensor; one that was not made here is in memory."""
        known = self._known.get(_key(tensor))
        if known is None or known[0].expired():
            self._put(tensor)
            known = self._known[_key(tensor)]
        return known[1]

    def _sources(self, tensor: Tensor) -> frozenset[_Source]:
        state = self._state(tensor)
        return frozenset({(state, touched_bytes(tensor))}) if isinstance(state, int) else state


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def touched_bytes(tensor: Tensor) -> int:
    """Return the bytes that reading a tensor once takes: of an expanded one, those that there are."""
    return min(tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes())
