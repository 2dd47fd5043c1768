"""What a plan is asked for, and what a choice takes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatrain.hardware import HardwareSpec
from megatrain.model.anatomy import Anatomy
from megatrain.model.moments import Moments
from megatrain.plan.choice import Batch, Choice, Pool
from megatrain.plan.cost import Rates
from megatrain.plan.memory import device_peak_bytes
from megatrain.plan.pools import drive_pools, host_pools

USABLE_DEVICE = 0.95
"""Of an accelerator's memory: the rest is the allocator's, which gives out whole pages of several sizes."""

USABLE_HOST = 0.98
"""Of host memory: page tables and the kernel's buffers grow with what is used."""

PROGRAM_BYTES = 512 << 20
"""What the program takes beside state and activations after its plan: compiled kernels, threads, a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a plan is asked for."""

    spec: HardwareSpec
    anatomy: Anatomy
    batch: Batch
    clips: bool = True
    """Gradients are clipped to a norm, so that they wait for it."""
    state: str = "fp32"
    """How moments are kept."""
    compiles: bool = False
    device_limit: int | None = None
    """Bytes of the device that the run may take; None: what the machine has."""
    host_limit: int | None = None
    drive_limit: int | None = None
    fixed: Mapping[str, object] | None = None
    """Fields of `Choice` that the user has set."""

    @property
    def limits(self) -> dict[str, int | None]:
        """Return the bytes that each tier may take; None: no limit."""
        spec = self.spec
        is_real = not spec.is_cpu and not spec.launches_inline
        usable = spec.device_bytes
        if is_real and usable is not None:
            usable = int(USABLE_DEVICE * usable)
        device = _least(usable, self.device_limit)
        host = max(0, int(USABLE_HOST * spec.host_bytes) - PROGRAM_BYTES)
        drive = 0 if spec.drives is None else spec.drives.nbytes
        return {
            "device": device,
            "ram": _least(host, self.host_limit),
            "nvme": _least(drive, self.drive_limit),
        }

    @property
    def moments(self) -> Moments:
        """Return the format of the moments."""
        return Moments(self.state)

    @property
    def rates(self) -> Rates:
        """Return the machine in the dtype and with the moments of the run."""
        return Rates(self.spec, self.anatomy.precision, self.state)


def pools_of(request: Request, choice: Choice) -> list[Pool]:
    """Return all pools of a choice, in all tiers."""
    anatomy, batch = request.anatomy, request.batch
    is_cpu = request.spec.is_cpu
    pools = device_peak_bytes(anatomy, choice, batch, state=request.moments, overlaps=not is_cpu)
    if is_cpu:
        pools = [replace(pool, tier="ram") for pool in pools]
    pools += host_pools(anatomy, choice, batch, request.moments)
    return pools + drive_pools(anatomy, choice, batch)


def host_bytes(request: Request, choice: Choice) -> int:
    """Return the bytes of all pools that are in RAM whatever the device is."""
    pools = host_pools(request.anatomy, choice, request.batch, request.moments)
    return sum(pool.nbytes for pool in pools)


def overflow(request: Request, choice: Choice) -> dict[str, int]:
    """Return by how many bytes a choice is over the limit of each tier that it does not fit into."""
    pools = pools_of(request, choice)
    excess = {}
    for tier, limit in request.limits.items():
        need = sum(pool.nbytes for pool in pools if pool.tier == tier)
        if limit is not None and need > limit:
            excess[tier] = need - limit
    return excess


def _least(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None
