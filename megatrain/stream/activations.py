"""How a streamed block runs: forward, recomputation and backward, with the slot held no longer than needed.

`recompute` keeps the block's inputs only and runs its forward again in the backward (torch's non-reentrant
checkpoint, which restores RNG and autocast state). `keep` keeps the graph; saved tensors that are weights are
replaced by their place in the block, so the slot is free between forward and backward all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from megatrain.errors import ConfigError, ModelError
from megatrain.stream.bring import Place, bring, swapped

if TYPE_CHECKING:
    from megatrain.stream.passes import AttachedBlock, Pass


class Activations(str, Enum):
    """What stays of a block between its forward and its backward."""

    RECOMPUTE = "recompute"
    KEEP = "keep"


def policies(value: str | Sequence[str], num_blocks: int) -> list[Activations]:
    """Read one policy for all blocks, or one per block.

    Raises:
        ConfigError: An unknown policy, or not one per streamed block.
    """
    names = [value] * num_blocks if isinstance(value, str) else list(value)
    if len(names) != num_blocks:
        raise ConfigError(
            f"activations names {len(names)} policies for {num_blocks} blocks; give one, or one per block"
        )
    known = {policy.value: policy for policy in Activations}
    for name in names:
        if name not in known:
            raise ConfigError(f"activations is {name!r}; use one of {', '.join(known)}")
    return [known[name] for name in names]


@dataclass(frozen=True, slots=True)
class _SavedWeight:
    """A saved tensor that is part of a block's weights: where, instead of the bytes."""

    element_offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class BlockVisit:
    """One call of a streamed block in the training forward, until its backward is done."""

    def __init__(self, block: AttachedBlock, current: Pass) -> None:
        """Prepare the visit of `block` in the forward pass `current`."""
        self._block = block
        self._executor = block.executor
        self._pass = current
        self._is_backward = False
        self._has_run = False
        self._place: Tensor | None = None
        self._trained = block.trained_now()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Activations) -> Any:
        """Run the block under its policy."""
        if policy is Activations.KEEP:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return self._run(*args, **kwargs)
        # checkpoint keeps the random state of its positional tensors' devices, and no other's: a layer that
        # gets its hidden states by name would draw another dropout mask in its recomputation.
        token = torch.empty(0, device=self._executor.lanes.device)
        return checkpoint(self._run_on, token, *args, use_reentrant=False, **kwargs)

    def _run_on(self, token: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's own forward on slot views: the forward first, the recomputation after it."""
        is_recomputation, self._has_run = self._has_run, True
        if is_recomputation:
            self._open_backward()
        else:
            self._place = self._executor.open(self._block.index, is_backward=False)
        try:
            places, tensors = self._bring()
            with swapped(places, tensors):
                args, kwargs = _with_own_caches(args, kwargs)
                return self._block.inner(*args, **kwargs)
        finally:
            if not is_recomputation:
                self._executor.close()
                self._place = None

    def _bring(self) -> tuple[list[Place], list[Tensor]]:
        operation = self._executor.open_visit
        assert operation is not None
        aliases = self._block.slots.aliases(self._block.index, operation.slot)
        weights = bring(aliases, self._trained, self._close_backward)
        return self._block.fill(weights, self._pass.tensors)

    def _open_backward(self) -> None:
        """Begin the backward visit if nothing has: a recomputation, a saved weight, or the bring itself."""
        if self._is_backward:
            if self._place is None:
                raise ModelError(
                    f"a second backward through the same forward of block {self._block.block.name}; its "
                    "graph is streamed once: run the forward again"
                )
        else:
            self._is_backward = True
            self._pass.begin_backward()
            self._place = self._executor.open(self._block.index, is_backward=True)

    def _close_backward(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients; autograd is done with the block."""
        self._open_backward()
        self._executor.close(self._block.line_up(grads, self._trained))
        self._place = None

    def _pack(self, tensor: Tensor) -> Tensor | _SavedWeight:
        place = self._place
        if place is None or tensor.untyped_storage().data_ptr() != place.untyped_storage().data_ptr():
            return tensor
        start = place.storage_offset() // tensor.dtype.itemsize
        return _SavedWeight(int(tensor.storage_offset()) - start, tensor.dtype, tensor.shape, tensor.stride())

    def _unpack(self, saved: Tensor | _SavedWeight) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._open_backward()
        place = self._place
        assert place is not None, "a weight is needed after its block's backward has ended"
        start = place.storage_offset() // saved.dtype.itemsize
        tensor = torch.empty(0, dtype=saved.dtype, device=place.device)
        return tensor.set_(place.untyped_storage(), start + saved.element_offset, saved.shape, saved.stride)


def _with_own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a block key-value caches of its own, as they were when the model's forward began.

    The model then takes the same code path as a resident one, a recomputation does not append twice, and no
    key or value outlives its block.
    """
    args = tuple(_own_cache(value) if isinstance(value, Cache) else value for value in args)
    return args, {
        key: _own_cache(value) if isinstance(value, Cache) else value for key, value in kwargs.items()
    }


def _own_cache(held: Any) -> Any:
    """Copy a cache's structure, its layers and their containers, but no tensor."""
    if isinstance(held, (list, tuple)):
        return type(held)(map(_own_cache, held))
    if isinstance(held, dict):
        return {key: _own_cache(value) for key, value in held.items()}
    if any(base.__module__ == Cache.__module__ for base in type(held).__mro__):  # a cache, or a layer of one
        own = copy.copy(held)
        vars(own).update({name: _own_cache(value) for name, value in vars(held).items()})
        return own
    return held
