"""The tensors that autograd saves of a layer for the backward, and those that `offload` takes to the host."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from megatrain.layout import pools
from megatrain.layout.host_buffers import LEAST_OFFLOADED_BYTES, OFFLOAD_ALIGNMENT
from megatrain.model.profile.metering import Meter
from megatrain.model.profile.rows import Rows
from megatrain.model.sequence.positions import shared_tensors


class SavedTensors:
    """The tensors that autograd saves of a layer, and those of them that `offload` would take to the host."""

    def __init__(self, meter: Meter, weights: Iterable[int]) -> None:
        """Hold nothing yet; `weights` are the storages of the layer's weights, which stay where they are."""
        self._sizes = meter.rows
        self._weights = set(weights)
        self._shared: set[int] = set()
        self._before = meter.storages()
        self._held: list[weakref.ref[Tensor]] = []

    def share(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let what all layers are given stay where it is, as `shared_tensors` finds it."""
        self._shared = {tensor.untyped_storage()._cdata for tensor in shared_tensors(args, kwargs)}

    def pack(self, tensor: Tensor) -> Tensor:
        """Keep a saved tensor."""
        tensor = tensor.detach()
        self._held.append(weakref.ref(tensor))
        return tensor

    def offloaded(self) -> tuple[Any, Any, Any]:
        """Return the bytes that go to the host as laid out there, as they are, and those that this frees."""
        found = [self._offloaded(rows) for rows in self._sizes.each()]
        if len(found) == 1:
            return found[0]
        laid_out, copied, freed = np.array(found).T
        return laid_out, copied, freed

    def _offloaded(self, rows: Rows) -> tuple[int, int, int]:
        groups: dict[int, list[tuple[int, int]]] = {}
        sizes: dict[int, int] = {}
        for reference in self._held:
            tensor = reference()
            if tensor is None or not self._is_offloaded(tensor, rows):
                continue
            storage = tensor.untyped_storage()
            shape, strides = (map(rows.one, numbers) for numbers in (tensor.shape, tensor.stride()))
            start = rows.one(int(tensor.storage_offset())) * tensor.dtype.itemsize
            last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
            groups.setdefault(storage._cdata, []).append((start, start + (last + 1) * tensor.dtype.itemsize))
            sizes[storage._cdata] = 0 if storage._cdata in self._before else rows.one(storage.nbytes())
        pieces = [stop - start for group in groups.values() for start, stop in _joined(group)]
        return pools.saved_visit(pieces), sum(pieces), sum(sizes.values())

    def _is_offloaded(self, tensor: Tensor, rows: Rows) -> bool:
        storage = tensor.untyped_storage()
        return (
            tensor.is_floating_point()
            and tensor.ndim > 0
            and tensor.numel() > 0
            and rows.one(storage.nbytes()) >= LEAST_OFFLOADED_BYTES
            and storage._cdata not in self._weights
            and storage._cdata not in self._shared
        )


def may_wait(tensor: Tensor) -> bool:
    """Whether a tensor is large enough to wait elsewhere."""
    return tensor.is_floating_point() and tensor.untyped_storage().nbytes() >= LEAST_OFFLOADED_BYTES


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans of one storage that overlap or touch, each from an aligned start."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start // OFFLOAD_ALIGNMENT * OFFLOAD_ALIGNMENT, stop))
    return found
