"""What would make a model fit that does not: options to try, those that cost the user least first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from megatrain.config import config_keys
from megatrain.config.choice import AUTO, KEYS, Choice, StepBatch
from megatrain.hardware import GIB
from megatrain.layout import pools
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.search.choices import first_fit, least, least_bytes, least_held
from megatrain.plan.search.request import Request, pools_of

_TERABYTE = 10**12

_SHORTEST = 256
"""Tokens: shorter sequences are not proposed."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that a user could change, and the request that it makes."""

    request: Callable[[], Request | None]
    """None: it cannot be changed in this way."""
    text: str | Callable[[Choice], str]
    """As options: `memory.fragments=true`, `--nvme 2TB`; or made from the choice that then fits."""

    def way_out(self) -> str | None:
        """Return the options with which a choice fits; None: none does even so."""
        request = self.request()
        choice = None if request is None else first_fit(request)
        if choice is None:
            return None
        return self.text if isinstance(self.text, str) else self.text(choice)


def list_remedies(
    request: Request, recount: Callable[..., Anatomy], *, is_running: bool = False
) -> Iterator[Remedy]:
    """Yield what a user could change so that a model fits.

    Args:
        request: What does not fit.
        recount: Counts the model anew with another `precision`, `micro_batch_size` or `seq_len`.
        is_running: A run is about to begin, on a machine that is as it is: only settings can be changed.
    """
    yield from _limits(request)
    yield from _settings(request)
    shrinks = _is_short_of_passing_memory(request)
    if shrinks or request.anatomy.precision == "fp32":
        yield from _batches(request, recount)
    if request.clips:
        yield Remedy(partial(_unclipped, request), "optim.max_grad_norm=null optim.updates=immediate")
    yield from _drives(request, is_running=is_running)
    if not is_running:
        yield from _ram(request)
    if request.state == "fp32" and "optim.state" in config_keys():
        for state in ("bf16", "int8"):
            yield Remedy(partial(replace, request, state=state), f"optim.state={state}")
    if shrinks:
        yield from _lengths(request, recount)


def device_bytes_held(request: Request) -> int:
    """Return the device's bytes of the least choice that no shorter sequence and no smaller batch saves."""
    tier = "ram" if request.spec.is_cpu else "device"
    pools = pools_of(request, least(request))
    return sum(pool.nbytes for pool in pools if pool.tier == tier and pool.is_exact)


def _is_short_of_passing_memory(request: Request) -> bool:
    """Whether activations make the difference: then a smaller batch may help."""
    tier = "ram" if request.spec.is_cpu else "device"
    held, limit = least_held(request, tier), request.limits[tier]
    return held is not None and (limit is None or held <= limit)


def size_option(nbytes: int) -> str:
    """Return bytes as a size that an option takes, rounded up to three digits or more."""
    unit, name = (GIB, "GiB") if nbytes >= 100 * GIB else (1 << 20, "MiB")
    return f"{math.ceil(nbytes / unit)}{name}"


def _limits(request: Request) -> Iterator[Remedy]:
    """Yield larger limits, where the user has set them below what the machine has."""
    host, device = request.host_limit, request.device_limit
    of_host = "memory.tiers.ram" if request.commits else "memory.host_limit"
    if host is not None:
        need = least_bytes(replace(request, host_limit=None), "ram")
        if need is not None:
            raised = replace(request, host_limit=_size(size_option(need)))
            yield Remedy(partial(_same, raised), f"{of_host}={size_option(need)}")
    if device is not None:
        need = least_bytes(replace(request, device_limit=None), "device")
        if need is not None:
            raised = replace(request, device_limit=_size(size_option(need)))
            yield Remedy(partial(_same, raised), f"memory.device_limit={size_option(need)}")
    if host is not None and device is not None:
        free = replace(request, host_limit=None, device_limit=None)
        yield Remedy(partial(_same, free), f"{of_host}=null memory.device_limit=null")


def _same(request: Request) -> Request:
    return request


def _size(option: str) -> int:
    return int(option[:-3]) * (GIB if option.endswith("GiB") else 1 << 20)


def _settings(request: Request) -> Iterator[Remedy]:
    """Yield other values of what the user has set: one setting at a time, then all."""
    names = [name for name in KEYS if name in request.choice.given]
    for freed in (*([name] for name in names), names):
        changed = replace(request, choice=replace(request.choice, **dict.fromkeys(freed, AUTO)))
        yield Remedy(partial(_same, changed), partial(_as_settings, freed))


def _as_settings(names: list[str], choice: Choice) -> str:
    """Write fields of a choice as overrides of settings."""
    values = {name: getattr(choice, name) for name in names}
    if len(set(choice.activations)) == 1 and "activations" in values:
        values["activations"] = choice.activations[0]
    elif "activations" in values:
        values["activations"] = "auto"
    return " ".join(
        f"{KEYS[name]}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in values.items()
    )


def _batches(request: Request, recount: Callable[..., Anatomy]) -> Iterator[Remedy]:
    batch, anatomy = request.batch, request.anatomy
    if anatomy.precision == "fp32":
        yield Remedy(
            lambda: replace(request, anatomy=recount(precision="bf16")),
            "train.precision=bf16",
        )
    rows = batch.micro_batch_size
    if rows > 1:
        count = batch.num_micro_batches * rows
        yield Remedy(
            lambda: replace(
                request,
                anatomy=recount(micro_batch_size=1),
                batch=replace(batch, micro_batch_size=1, num_micro_batches=count),
            ),
            f"train.micro_batch_size=1 train.grad_accumulation={count}",
        )


def _drives(request: Request, *, is_running: bool) -> Iterator[Remedy]:
    """Yield drives, or larger ones, if they hold two copies of all state and nothing else is too large."""
    if request.choice.tiers != AUTO:
        return
    nbytes = enough_drives(request)
    have = 0 if request.spec.drives is None else request.spec.drives.nbytes
    if nbytes > have:
        spec = request.spec.with_drive_bytes(nbytes)
        size = f"{nbytes // _TERABYTE}TB"
        text = f"memory.tiers='{{nvme: [DIRECTORY]}}' on a drive with {size} free"
        changed = replace(request, spec=spec, drive_limit=None, commits=is_running)
        yield Remedy(partial(_same, changed), text if is_running else f"--nvme {size}")


def enough_drives(request: Request) -> int:
    """Return the bytes of drives that hold two copies of all state, in whole terabytes."""
    blocks = BlockSums.of(request.anatomy, fragments=False).totals[:]
    return -(-sum(pools.drive_pools(blocks).values()) // _TERABYTE) * _TERABYTE


def _ram(request: Request) -> Iterator[Remedy]:
    """Yield as much host memory as it takes, the device and the drives being as they are."""
    endless = replace(request, spec=request.spec.with_ram(1 << 62), host_limit=None)
    need = least_bytes(endless, "ram")
    if need is None or need <= request.spec.host_bytes:
        return
    option = size_option(need)
    spec = request.spec.with_ram(_size(option))
    yield Remedy(lambda: replace(request, spec=spec, host_limit=None), f"--ram {option}")


def _unclipped(request: Request) -> Request:
    return replace(request, clips=False, choice=replace(request.choice, updates="immediate"))


def _lengths(request: Request, recount: Callable[..., Anatomy]) -> Iterator[Remedy]:
    """Yield shorter sequences, with as many tokens per step.

    To count a model anew takes a second, so that not every length is tried: the shortest shows whether any
    helps, and a line from there to the length that does not fit, which one may be long enough. Memory grows
    with the length along that line or below, but for a head that is computed in chunks; it is tried as well.
    """
    batch, tier = request.batch, "ram" if request.spec.is_cpu else "device"
    lengths = [length for part in (2, 4, 8, 16, 32, 64) if (length := batch.seq_len // part) >= _SHORTEST]
    if not lengths:
        return

    def remedy(length: int) -> Remedy:
        count = batch.num_micro_batches * (batch.seq_len // length)
        shorter = replace(batch, seq_len=length, num_micro_batches=count)
        text = f"data.seq_len={length} train.grad_accumulation={count}"
        return Remedy(partial(_shortened, request, recount, shorter), text)

    last = remedy(lengths[-1])
    shortest = last.request()
    if shortest is None or first_fit(shortest) is None:
        return
    low, high, limit = least_bytes(shortest, tier), least_bytes(request, tier), request.limits[tier]
    if low is not None and high is not None and limit is not None and high > low:
        share = (limit - low) / (high - low)
        longest = lengths[-1] + share * (batch.seq_len - lengths[-1])
        yield from (remedy(length) for length in [n for n in lengths if n <= longest][:1])
    yield last


def _shortened(request: Request, recount: Callable[..., Anatomy], batch: StepBatch) -> Request:
    return replace(request, anatomy=recount(seq_len=batch.seq_len), batch=batch)
