"""The request that a plan answers, and what a choice takes of its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from megatrain.config.budgets import ALL
from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT, find
from megatrain.config.plan import Pool
from megatrain.config.policies import POLICIES
from megatrain.hardware import HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.cost.deterministic import deterministic_spec
from megatrain.plan.cost.rates import Kernels, Rates
from megatrain.plan.cost.step_time import Step
from megatrain.plan.memory.device_peaks import DevicePeaks
from megatrain.plan.memory.device_pools import allocated, device_peak_bytes
from megatrain.plan.memory.host_pools import drive_pools, host_pools, of_other_ranks
from megatrain.plan.memory.passes import most_without_gradients

USABLE_DEVICE = 0.95
"""The usable part of an accelerator's memory: the allocator has the rest, since its pages are whole."""

USABLE_HOST = 0.98
"""The usable part of host memory: page tables and the kernel's buffers grow with what is used."""

_FREE_SHARE, _FREE_BYTES = 0.05, 8 << 30
"""The host memory that stays free for whatever else runs there, the smaller of the two, unless the run has a
limit of its own. Otherwise a browser that is opened beside the run would end it."""

PROGRAM_BYTES = 512 << 20
"""The bytes that each rank's program takes beside state and activations after its plan: compiled kernels,
threads, a batch."""


@dataclass(frozen=True, kw_only=True)  # without slots: what follows from it is found once
class Request:
    """A request for a plan: the machine, the model and the batch, with what is decided."""

    spec: HardwareSpec
    """The machine; of several nodes, one of them."""
    anatomy: Anatomy
    batch: StepBatch
    """The batch of one rank, where several train together."""
    clips: bool = True
    """Gradients are clipped to a norm, so that they wait for it."""
    optimizer_name: str = DEFAULT.name
    state: str = DEFAULT.state
    """The format in which the optimizer's state is kept."""
    compiles: bool = False
    budget: float = ALL
    """The budget within which layers are compiled, if they are."""
    fuses: bool = False
    """Layers run with fused kernels though they are not compiled: `model.kernels=liger`."""
    deterministic: bool = False
    """Operations give the same bits in every run, attention among them."""
    commit_every: int | None = None
    """Steps between commits of all of the run's state to drives, wherever it lives; None: there are none."""
    names_drives: bool = False
    """The run's settings say where the drives are, and with them what it may take of RAM."""
    device_limit: int | None = None
    """Bytes of the device that the run may take; None: what the machine has."""
    host_limit: int | None = None
    """Bytes of host memory that it may take; None: what the machine has but for what stays free."""
    drive_limit: int | None = None
    choice: Choice = field(default_factory=Choice)
    """The settings that are decided already; the planner decides those that are open."""
    start: Choice | None = field(default=None, compare=False)
    """A choice that was found for a similar request: what becomes of it here is tried first."""

    def __post_init__(self) -> None:
        """Let layers keep what they keep where they are compiled, if they are."""
        if self.compiles:
            object.__setattr__(self, "anatomy", self.anatomy.as_compiled(self.budget))

    @cached_property
    def known(self) -> dict[str, Any]:
        """Return what a search has found out about the request, by name."""
        return {}

    @cached_property
    def known_bytes(self) -> _Known:
        """Return the bytes of choices that were counted in this process, for requests that count alike."""
        key = (self.batch, self.optimizer, self.spec.is_cpu, self.has_scratch)
        return _BYTES.setdefault(self.anatomy, {}).setdefault(key, {})

    @property
    def commits(self) -> bool:
        """Return whether the run commits its state."""
        return self.commit_every is not None

    def step(self, choice: Choice) -> Step:
        """Return the step of a choice, not timed yet."""
        rates, anatomy, batch = self.rates, self.anatomy, self.batch
        return Step(rates, anatomy, choice, batch, clips=self.clips, commit_every=self.commit_every)

    @cached_property
    def limits(self) -> dict[str, int | None]:
        """Return the bytes that each tier may take; None: no limit."""
        spec = self.spec
        usable = spec.device_bytes
        if spec.has_accelerator and usable is not None:
            usable = int(USABLE_DEVICE * usable)
        device = _least(usable, self.device_limit)
        host = max(0, int(USABLE_HOST * spec.host_bytes) - self._free_bytes - self._program_bytes)
        drive = 0 if spec.drives is None else spec.drives.nbytes
        return {
            "device": device,
            "ram": _least(host, self.host_limit),
            "nvme": _least(drive, self.drive_limit),
        }

    @cached_property
    def optimizer(self) -> Optimizer:
        """Return the optimizer of the run, with its state in this format."""
        return find(self.optimizer_name, self.state)

    @cached_property
    def may_use_drives(self) -> bool:
        """Return whether anything may go on drives: there are some, and what is kept goes there."""
        goes = self.optimizer.goes_on_drives and not self.anatomy.keeps_codes
        return self.spec.drives is not None and goes

    @cached_property
    def has_scratch(self) -> bool:
        """Return whether updates on the device are torch's operations, which take scratch memory."""
        spec = self.spec
        return spec.updates_with_scratch or (spec.has_accelerator and not self.optimizer.may_fuse)

    @cached_property
    def rates(self) -> Rates:
        """Return the machine as a rank has it, in the dtype and with the optimizer of the run."""
        has_kernels = self.spec.has_accelerator and not self.spec.updates_with_scratch
        fuses_head = has_kernels and self.anatomy.head_has_kernel
        kernels = Kernels(fuses_layers=self.compiles or self.fuses, fuses_head=fuses_head)
        spec = deterministic_spec(self.spec, self.heads) if self.deterministic else self.spec
        return Rates(
            spec.of_rank(), self.anatomy.precision, self.optimizer, kernels, self.anatomy.head_dim or 128
        )

    @property
    def heads(self) -> int:
        """Return the query heads of all rows of a micro-batch; 0: not known."""
        return self.anatomy.num_heads * self.anatomy.micro_batch_size

    def machine_bytes(self, need: int) -> int:
        """Return the least host memory of a machine of which so many bytes may be taken."""
        need += self._program_bytes
        if self.host_limit is not None:
            return math.ceil(need / USABLE_HOST)
        small, large = need / (USABLE_HOST - _FREE_SHARE), (need + _FREE_BYTES) / USABLE_HOST
        return math.ceil(min(small, large))

    @property
    def _free_bytes(self) -> int:
        """Return the bytes of host memory that stay free."""
        return 0 if self.host_limit is not None else int(min(_FREE_SHARE * self.spec.host_bytes, _FREE_BYTES))

    @property
    def _program_bytes(self) -> int:
        return self.batch.ranks_of_node * PROGRAM_BYTES


def pools_of(request: Request, choice: Choice) -> list[Pool]:
    """Return all pools of a choice, in all tiers."""
    anatomy, batch = request.anatomy, request.batch
    is_cpu = request.spec.is_cpu
    pools = _on_device(request, choice)
    if is_cpu:
        own = sum(pool.nbytes for pool in pools)
        pools = [replace(pool, tier="ram") for pool in pools]
        pools += of_other_ranks("other ranks' computing", own, batch)
    pools += host_pools(anatomy, choice, batch, request.optimizer)
    return pools + drive_pools(anatomy, choice, batch, request.optimizer)


def _on_device(request: Request, choice: Choice) -> list[Pool]:
    spec = request.spec
    return device_peak_bytes(
        request.anatomy,
        choice,
        request.batch,
        optimizer=request.optimizer,
        overlaps=not spec.is_cpu,
        has_scratch=request.has_scratch,
    )


def _peak_bytes(request: Request, choice: Choice) -> int:
    asked, has_scratch = (request.anatomy, choice, request.batch, request.optimizer), request.has_scratch
    return DevicePeaks(*asked, overlaps=not request.spec.is_cpu, has_scratch=has_scratch).largest.nbytes


def most_together(request: Request, choice: Choice) -> int:
    """Return how many micro-batches pass together without gradients in the memory of a step."""
    spec = request.spec
    return most_without_gradients(
        request.anatomy,
        choice,
        request.batch,
        request.optimizer,
        overlaps=not spec.is_cpu,
        has_scratch=request.has_scratch,
    )


def host_bytes(request: Request, choice: Choice) -> int:
    """Return the bytes of all pools that are in RAM whatever the device is."""
    return _elsewhere(request, choice)[0]


def _elsewhere(request: Request, choice: Choice) -> tuple[int, int]:
    """Return the bytes of all pools in RAM whatever the device is, and on drives, once per process.

    Where no activations leave the device, it is the same under all policies.
    """
    stays = choice.boundaries == "device" and not any(POLICIES[n].is_offloaded for n in {*choice.activations})
    key, known = (_ELSEWHERE(choice), () if stays else choice.activations), request.known_bytes
    if key not in known:
        asked = request.anatomy, choice, request.batch, request.optimizer
        in_ram, on_drives = host_pools(*asked), drive_pools(*asked)
        known[key] = sum(pool.nbytes for pool in in_ram), sum(pool.nbytes for pool in on_drives)
    return known[key]


def overflow(request: Request, choice: Choice) -> dict[str, int]:
    """Return by how many bytes a choice is over the limit of each tier that it does not fit into."""
    return {tier: nbytes for tier, nbytes in _over(request, choice) if nbytes > 0}


def overflowing(request: Request, choice: Choice, tier: str) -> int:
    """Return by how many bytes a choice is over the limit of a tier that has one; negative: what is left."""
    return dict(_over(request, choice))[tier]


def excess(request: Request, choice: Choice) -> int:
    """Return by how many bytes a choice is over the limit of the tier that it fits into least."""
    return max(nbytes for _, nbytes in _over(request, choice))


def is_too_large(request: Request, choice: Choice) -> bool:
    """Return whether a choice is over the device's limit, whatever is on drives: the quickest check."""
    limit = request.limits["device"]
    return limit is not None and not request.spec.is_cpu and _device_bytes(request, choice) > limit


def _over(request: Request, choice: Choice) -> list[tuple[str, int]]:
    limits = request.limits
    needs = _needs(request, choice)
    return [(tier, needs[tier] - limit) for tier, limit in limits.items() if limit is not None]


def _needs(request: Request, choice: Choice) -> dict[str, int]:
    """Return a choice's bytes by tier."""
    in_ram, on_drives = _elsewhere(request, choice)
    needs = {"device": 0, "ram": in_ram, "nvme": on_drives}
    if request.spec.is_cpu:
        needs["ram"] += request.batch.ranks_of_node * _device_bytes(request, choice)
    else:
        needs["device"] = _device_bytes(request, choice)
    return needs


def _device_bytes(request: Request, choice: Choice) -> int:
    """Return the bytes on the device.

    What is allocated is the same under all policies, and the largest moment with any number of buffers: each
    is counted once per process.
    """
    known, allocates = request.known_bytes, _ALLOCATED(choice)
    moment = (_MOMENT(choice), any(place != "device" for place in choice.gradients))
    if allocates not in known:
        pools = allocated(request.anatomy, choice, request.batch, request.optimizer)
        known[allocates] = sum(pool.nbytes for pool in pools), 0
    if moment not in known:
        known[moment] = _peak_bytes(request, choice), 0
    return known[allocates][0] + known[moment][0]


def _all_but(*names: str) -> Callable[[Choice], tuple[object, ...]]:
    """Return what reads every field of a choice but these."""
    return attrgetter(*(field.name for field in fields(Choice) if field.name not in names))


_OFF_DEVICE = ("updates", "sums", "tiers", "blocks_in_ram", "weights_in_ram", "mirror_resident")
_ALLOCATED = _all_but(*_OFF_DEVICE, "activations", "boundaries")
_MOMENT = _all_but(*_OFF_DEVICE, "num_slots", "num_gradient_buffers", "gradients")
_ELSEWHERE = _all_but("num_slots", "num_gradient_buffers", "activations")
"""The fields that decide a choice's bytes on the device for good, for a moment, and off the device."""
_Known: TypeAlias = dict[tuple[object, ...], tuple[int, int]]
_BYTES: WeakKeyDictionary[Anatomy, dict[tuple[object, ...], _Known]] = WeakKeyDictionary()


def _least(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None
