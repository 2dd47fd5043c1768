"""The interface of an optimizer's kernels, and the place where those of each are found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.optim.pool import WorkerPool
from megatrain.optim.tasks import Apart


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeStep:
    """The settings and numbers of one update of one range."""

    hyper: Mapping[str, Any]
    """The settings of the range's group of parameters: `lr`, `weight_decay`, and the optimizer's own."""
    count: int
    """The number of updates that the range will have had after this one; at least 1."""
    grad_scale: float = 1.0
    """The factor on the gradient, rounded to fp32, as is the product: `clip.clip_coefficient`. 1: none."""
    noise: tuple[int, int, int] = (0, 0, 0)
    """The source of random rounding: two words of key (`rounding_key`), and the index of the range's
    first element in its parameter, a multiple of 64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RangePlanes:
    """The planes that an update reads and writes: 1-D contiguous tensors of N elements, all on one device."""

    working: Tensor
    """bfloat16; or float32 where `remainder` is None: then it is the master."""
    remainder: Tensor | None
    """int16: with `working`, the fp32 master (`store.master`)."""
    gradient: Tensor
    """bfloat16 or float32; only read."""
    state: Mapping[str, Tensor]
    """The optimizer's planes; those of scales have one value per `SCALE_NUMEL` elements."""


Ranges = Iterable[tuple[RangeStep, RangePlanes]]
"""Ranges to update, none of which overlap."""


def rounding_key(seed: int, name: str, step: int) -> tuple[int, int]:
    """Return two words of 32 bits that say which random numbers round a parameter's state in a step.

    They depend on what a run is made of and not on how it is run: not on blocks, threads or resuming.

    Args:
        seed: The seed of the run.
        name: The name of the parameter, as `model.named_parameters()` gives it.
        step: The number of updates that the parameter will have had after this one.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")


class Kernels(Protocol):
    """The updates of an optimizer: bit for bit the same wherever they run, however ranges are cut."""

    def update_on_host(self, pool: WorkerPool, ranges: Ranges, apart: Sequence[Sequence[Apart]] = ()) -> None:
        """Update ranges in host memory in place; small ones share tasks of the pool.

        Args:
            pool: The threads to use.
            ranges: The ranges.
            apart: The parts of each range that one thread updates by itself; empty: there are none.
        """

    def update_on_device(self, device: torch.device, ranges: Ranges) -> None:
        """Update ranges on a device in place, in the current stream, without waiting for it."""

    def why_not_fused(self, kind: str) -> str | None:
        """Return why torch's operations update blocks on a kind of device; None: one kernel does."""


def kernels_of(optimizer: Optimizer) -> Kernels:
    """Return the kernels of an optimizer: the functions of the module or package of its name."""
    return cast(Kernels, import_module(f"megatrain.optim.{optimizer.name}"))


def fuses_updates(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether one kernel updates blocks on a device; else torch's operations do.

    The first call for a kind of device tries the kernel there.
    """
    return device.type != "cpu" and kernels_of(optimizer).why_not_fused(device.type) is None
