"""Measures from outside what an engine takes on a device that is the CPU: every storage, and every buffer."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

import megatrain
from megatrain.stream.evaluate import losses
from megatrain.stream.lanes import Lanes
from megatrain.stream.lanes.base import InlineLanes
from tests.reference import attach_plainly


class DeviceBytes(TorchDispatchMode):
    """Follows every storage that an operation makes, and the lanes' own buffers, until they are gone.

    Memory of the lanes and of the host state is mapped, not made by torch: its storages cannot be resized,
    which tells them from others.
    """

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self._lanes = lanes
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._nbytes = 0
        self.peak = 0
        """Most bytes at a time."""
        self.peak_dynamic = 0
        """Of these, what is not the lanes' own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.device.type == "cpu"]
        if not made:
            return result
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for leaf in made:
            storage = leaf.untyped_storage()
            if storage._cdata not in given and storage.resizable():
                self._forget(storage._cdata)
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self._nbytes += storage.nbytes()
        if self._nbytes + self._lanes.device_bytes > self.peak:
            for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
                self._forget(key)
        if self._nbytes + self._lanes.device_bytes > self.peak:
            self.peak, self.peak_dynamic = self._nbytes + self._lanes.device_bytes, self._nbytes
        return result

    def _forget(self, key: int) -> None:
        self._nbytes -= self._live.pop(key, (None, 0))[1]


@dataclass(frozen=True)
class Measured:
    """What a run took."""

    peak_bytes: int
    """Most bytes on the device at a time."""
    dynamic_bytes: int
    """Of these, what the lanes had not allocated for good."""
    allocated_bytes: int
    """Most that the lanes had allocated."""
    host_bytes: int
    """All planes of state."""
    stash_bytes: int
    """Activations and boundaries on the host."""
    passing_bytes: int
    """Most bytes on the device while micro-batches pass together without gradients."""


def measure(
    config: PretrainedConfig,
    *,
    precision: str,
    micro_batch_size: int,
    seq_len: int,
    num_micro_batches: int = 1,
    max_grad_norm: float | None = 1.0,
    updates: str = "deferred",
    is_packed: bool = False,
    num_passing: int = 1,
    **settings: Any,
) -> Measured:
    """Attach an engine to a random model and run two steps; packed rows are of two documents each.

    Then `num_passing` micro-batches pass together without gradients.
    """
    split = {"fragments": settings.get("fragments", False), "expert_chunks": settings.get("expert_chunks", 1)}
    model = megatrain.load(config=config, precision=precision, **split)
    model.train()
    generator = torch.Generator().manual_seed(0)
    vocab = config.get_text_config().vocab_size
    batches: list[Mapping[str, Any]] = []
    for _ in range(num_micro_batches):
        ids = torch.randint(0, vocab, (micro_batch_size, seq_len), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if is_packed:
            batch["position_ids"] = (torch.arange(seq_len) % (seq_len - 9)).expand_as(ids).contiguous()
        batches.append(batch)
    lanes = InlineLanes()
    gc.collect()
    with DeviceBytes(lanes) as device:
        engine = attach_plainly(
            model, device=lanes, precision=precision, num_micro_batches=num_micro_batches, **settings
        )
        optimizer = engine.adamw(max_grad_norm=max_grad_norm, updates=updates)
        for _ in range(2):
            engine.forward_backward(batches)
            optimizer.step()
            engine.sync()
        peak, dynamic = device.peak, device.peak_dynamic
        device.peak = 0
        engine.together.planned_tokens = num_passing * micro_batch_size * seq_len
        passing = [batches[number % num_micro_batches] for number in range(num_passing)]
        for _ in losses(engine, passing):
            pass
    together = min(num_micro_batches, settings.get("lockstep", 1))
    # on a device, a round's tokens, labels and positions
    ids_bytes = (16 + 8 * is_packed) * micro_batch_size * seq_len
    result = Measured(
        peak_bytes=peak + together * ids_bytes,
        dynamic_bytes=dynamic + together * ids_bytes,
        allocated_bytes=lanes.peak_bytes,
        host_bytes=engine.host_bytes,
        stash_bytes=engine.arrangement.offloaded.host_bytes,
        passing_bytes=device.peak + num_passing * ids_bytes,
    )
    engine.detach()
    return result
