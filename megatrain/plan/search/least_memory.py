"""The host memory, or the room on drives, that is enough: the one answer that all of a plan gives."""

from __future__ import annotations

from dataclasses import replace

from megatrain.config.choice import AUTO, Choice
from megatrain.layout import pools
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.search.choices import first_fit, least_bytes
from megatrain.plan.search.request import Request
from megatrain.plan.search.sizes import DRIVE_SIZES, MEMORY_SIZES, Size, least_size


def fits(request: Request) -> bool:
    """Return whether a request has a choice that fits."""
    return first_fit(request) is not None


def enough_ram(request: Request) -> Size | None:
    """Return the least host memory of the machine with which a model fits, its device and drives as they are.

    None: none is enough.
    """

    def with_ram(nbytes: int) -> Request:
        return replace(request, spec=request.spec.with_ram(nbytes))

    endless = with_ram(MEMORY_SIZES[-1].nbytes)
    if not fits(endless):
        return None
    need = least_bytes(endless, "ram")
    guess = request.spec.host_bytes if need is None else request.machine_bytes(need)
    return least_size(MEMORY_SIZES, lambda nbytes: fits(with_ram(nbytes)), guess=guess)


def enough_drives(request: Request) -> Size | None:
    """Return the least free space on drives with which a model fits, the host memory being as it is.

    None: none is enough, or the settings say that nothing goes there.
    """
    if request.choice.tiers != AUTO:
        return None

    def with_drives(nbytes: int) -> Request:
        return replace(request, spec=request.spec.with_drive_bytes(nbytes), drive_limit=None)

    if not fits(with_drives(DRIVE_SIZES[-1].nbytes)):
        return None
    blocks = BlockSums.of(request.anatomy, Choice(fragments=False, expert_chunks=1)).totals[:]
    guess = sum(pools.drive_pools(blocks, request.optimizer).values())
    return least_size(DRIVE_SIZES, lambda nbytes: fits(with_drives(nbytes)), guess=guess)
