"""The changes that would make a model fit: settings that cost least first, then memory, then a device.

A remedy is what a user would type, and the request that it makes. It is only proposed when that request, with
the number as it is written, has a choice that fits. A number is the least of its kind: see `sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from megatrain.config.choice import AUTO, KEYS, Choice
from megatrain.config.optimizers.registry import OPTIMIZERS
from megatrain.config.tiles import TILE
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.choices import first_fit, least_bytes, least_held
from megatrain.plan.search.least_memory import enough_drives, enough_ram, fits
from megatrain.plan.search.request import Request
from megatrain.plan.search.sizes import DRIVE_SIZES, MEMORY_SIZES, Size, least_size

SHORTEST = 256
"""Tokens: shorter sequences are not proposed."""

_MOST_SETTINGS, _MOST_MEMORY = 2, 3
"""Remedies of a kind that are proposed."""


SmallerStep = Callable[[int, int], str]
"""Says the settings of a step of a part, a half or a quarter, that has so many tokens: `(2, 65536)`."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that a user could make, with the request that it makes, which fits."""

    text: str
    """The change as options: `memory.fragments=true`, `--nvme 2TB`."""
    request: Request


def advise(
    request: Request,
    recount: Callable[..., Anatomy],
    *,
    is_running: bool = False,
    smaller: SmallerStep | None = None,
) -> list[Remedy]:
    """Return what a user could change so that a model fits: one line each, settings before hardware.

    Args:
        request: The request that does not fit.
        recount: A function that counts the model anew with another `precision`, `micro_batch_size`,
            `seq_len` or `tile`.
        is_running: Whether a run is about to begin, on a machine that is as it is: only settings can be
            changed.
        smaller: A function that returns the settings of a smaller step; None: the step is to stay as it is.
    """
    found = list(islice(list_settings(request, recount, smaller), _MOST_SETTINGS))
    memory = list(islice(list_memory(request, is_running=is_running), _MOST_MEMORY))
    if not (found or memory or is_running):
        return list(islice(list_devices(request), 1))
    return found + memory


def with_ways_out(problem: str, remedies: list[Remedy]) -> str:
    """Return one sentence for a run that cannot begin: what is too small, and what would help."""
    if remedies:
        return f"{problem}; use {', or '.join(remedy.text for remedy in remedies)}"
    return f"{problem}; no other setting is enough, nor are drives: megatrain plan says what a machine needs"


def list_settings(
    request: Request, recount: Callable[..., Anatomy], smaller: SmallerStep | None = None
) -> Iterator[Remedy]:
    """Yield settings with which a model fits: first those that change no bit of a result; see `advise`."""
    num_found = 0
    for remedy in _settings(request, recount, smaller):
        if fits(remedy.request):
            num_found += 1
            yield remedy
    if not num_found and _is_short_of_passing_memory(request):
        yield from _lengths(request, recount)


def _settings(
    request: Request, recount: Callable[..., Anatomy], smaller: SmallerStep | None
) -> Iterator[Remedy]:
    yield from _limits(request)
    yield from _freed(request)
    batch, anatomy = request.batch, request.anatomy
    rows = batch.micro_batch_size // batch.rows_each
    if rows > 1 and _is_short_of_passing_memory(request):
        count = batch.num_micro_batches * rows
        fewer = replace(batch, micro_batch_size=batch.rows_each, num_micro_batches=count)
        yield Remedy(
            f"train.micro_batch_size=1 train.grad_accumulation={count * batch.num_ranks}",
            replace(request, anatomy=recount(micro_batch_size=batch.rows_each), batch=fewer),
        )
    if not batch.tile and batch.seq_len > TILE and _is_short_of_passing_memory(request):
        tiled = replace(batch, tile_tokens=TILE)
        yield Remedy(f"train.tile_tokens={TILE}", replace(request, anatomy=recount(tile=TILE), batch=tiled))
    if smaller is not None:
        yield from _smaller_steps(request, smaller)
    if anatomy.precision == "fp32":
        yield Remedy("train.precision=bf16", replace(request, anatomy=recount(precision="bf16")))
    if request.clips:
        choice = replace(request.choice, updates="immediate")
        unclipped = replace(request, clips=False, choice=choice)
        yield Remedy("optim.max_grad_norm=null optim.updates=immediate", unclipped)
    yield from list_states(request)


def _smaller_steps(request: Request, smaller: SmallerStep) -> Iterator[Remedy]:
    """Yield the largest step that fits, of a half, a quarter or an eighth: smaller ones train too slowly."""
    batch = request.batch
    for part in (2, 4, 8):
        if batch.num_micro_batches % (part * batch.num_runs):
            return
        fewer = replace(request, batch=replace(batch, num_micro_batches=batch.num_micro_batches // part))
        if fits(fewer):
            yield Remedy(smaller(part, fewer.batch.step_tokens), fewer)
            return


def list_states(request: Request) -> Iterator[Remedy]:
    """Yield the optimizer's state in fewer bytes: not exact, and in RAM where drives do not take it."""
    if not request.optimizer.is_exact:
        return
    for other in OPTIMIZERS[request.optimizer_name]:
        if not other.compresses(request.optimizer):
            continue
        changed = replace(request, state=other.state)
        if not request.names_drives or other.goes_on_drives:
            yield Remedy(f"optim.state={other.state}", changed)
            continue
        changed = replace(changed, names_drives=False, commit_every=None)
        yield Remedy(f"optim.state={other.state} memory.tiers=auto", changed)


def _limits(request: Request) -> Iterator[Remedy]:
    """Yield larger limits, where the user has set them below what the machine has."""
    given = [field for field in ("host_limit", "device_limit") if getattr(request, field) is not None]
    for field in given:
        if not fits(_changed(request, field, None)):
            continue
        size = _least(partial(_changed, request, field), MEMORY_SIZES, guess=getattr(request, field))
        if size is not None:
            yield Remedy(f"{_limit_key(request, field)}={size.text}", _changed(request, field, size.nbytes))
    if len(given) > 1:
        free = replace(request, host_limit=None, device_limit=None)
        yield Remedy(" ".join(f"{_limit_key(request, field)}=null" for field in given), free)


def _limit_key(request: Request, field: str) -> str:
    """Return the setting of a limit: the host's is another one where the run has named its drives."""
    if field == "host_limit" and request.names_drives:
        return "memory.tiers.ram"
    return f"memory.{field}"


def _changed(request: Request, field: str, value: Any) -> Request:
    return replace(request, **{field: value})


def _least(make: Callable[[int], Request], sizes: list[Size], *, guess: int) -> Size | None:
    return least_size(sizes, lambda nbytes: fits(make(nbytes)), guess=guess)


def _freed(request: Request) -> Iterator[Remedy]:
    """Yield other values of what the user has set: of one setting, or else of as few as it takes."""
    given = [name for name in KEYS if name in request.choice.given]
    alone = [found for name in given if (found := _with_others(request, [name])) is not None]
    yield from alone
    if alone or _with_others(request, given) is None:
        return
    for name in list(given):
        fewer = [other for other in given if other != name]
        given = fewer if _with_others(request, fewer) is not None else given
    found = _with_others(request, given)
    assert found is not None
    yield found


def _with_others(request: Request, names: list[str]) -> Remedy | None:
    """Return the values of some settings with which it fits; None: there are none."""
    choice = first_fit(replace(request, choice=replace(request.choice, **dict.fromkeys(names, AUTO))))
    if choice is None:
        return None
    values = {name: _as_setting(name, choice) for name in names}
    text = " ".join(f"{KEYS[name]}={_word(value)}" for name, value in values.items())
    kept = {name: AUTO if value == AUTO else getattr(choice, name) for name, value in values.items()}
    return Remedy(text, replace(request, choice=replace(request.choice, **kept)))


def _as_setting(name: str, choice: Choice) -> Any:
    value = getattr(choice, name)
    if isinstance(value, tuple):  # one for each layer
        return value[0] if len(set(value)) == 1 else AUTO
    return value


def _word(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_short_of_passing_memory(request: Request) -> bool:
    """Return whether activations make the difference: then a smaller batch may help."""
    tier = "ram" if request.spec.is_cpu else "device"
    held, limit = least_held(request, tier), request.limits[tier]
    return held is not None and (limit is None or held <= limit)


def list_memory(request: Request, *, is_running: bool = False) -> Iterator[Remedy]:
    """Yield the least drives, or host memory, or both together, with which a model fits."""
    drives = enough_drives(request)
    if drives is not None:
        text = f"--nvme {drives.text}"
        changed = replace(request, spec=request.spec.with_drive_bytes(drives.nbytes), drive_limit=None)
        if is_running:
            text = f"memory.tiers='{{nvme: [DIRECTORY]}}' on a drive with {drives.text} free"
            changed = replace(changed, commit_every=1, names_drives=True)
        if fits(changed):
            yield Remedy(text, changed)
    if is_running:
        return
    free = replace(request, host_limit=None)
    ram = enough_ram(free)
    if ram is None or ram.nbytes <= request.spec.host_bytes:
        return
    lifted = "" if request.host_limit is None else f"{_limit_key(request, 'host_limit')}=null "
    found = list(_ram_and_drives(free, ram)) if drives is None else []
    found.append(Remedy(f"--ram {ram.text}", replace(free, spec=request.spec.with_ram(ram.nbytes))))
    yield from (replace(remedy, text=lifted + remedy.text) for remedy in found)


def _ram_and_drives(request: Request, alone: Size) -> Iterator[Remedy]:
    """Yield host memory with drives, where that takes less of it than without."""
    endless = replace(request, spec=request.spec.with_drive_bytes(DRIVE_SIZES[-1].nbytes), drive_limit=None)
    ram = enough_ram(endless)
    if ram is None or ram.nbytes >= alone.nbytes:
        return
    with_ram = replace(request, spec=request.spec.with_ram(ram.nbytes))
    drives = enough_drives(with_ram)
    if drives is not None:
        spec = with_ram.spec.with_drive_bytes(drives.nbytes)
        text = f"--ram {ram.text} --nvme {drives.text}"
        yield Remedy(text, replace(with_ram, spec=spec, drive_limit=None))


def list_devices(request: Request) -> Iterator[Remedy]:
    """Yield the least memory of a device with which a model fits: with other memory as it is, or with more.

    It is said as what a machine needs, since no setting and no option gives a machine another device.
    """
    if request.spec.device_bytes is None or request.spec.is_cpu:
        return

    def with_device(asked: Request, nbytes: int) -> Request:
        return replace(asked, spec=replace(asked.spec, device_bytes=nbytes), device_limit=None)

    endless = with_device(request, MEMORY_SIZES[-1].nbytes)
    beside = [Remedy("", endless)] if fits(endless) else list(list_memory(endless))
    for more in beside:
        make = partial(with_device, more.request)
        size = _least(make, MEMORY_SIZES, guess=request.spec.device_bytes)
        if size is not None:
            text = f"a machine with {size.text} on its device" + (f", and {more.text}" if more.text else "")
            yield Remedy(text, make(size.nbytes))


def _lengths(request: Request, recount: Callable[..., Anatomy]) -> Iterator[Remedy]:
    """Yield a shorter sequence, with as many tokens per step.

    To count a model anew takes a second, so that not every length is tried: the shortest shows whether any
    helps, and a line from there to the length that does not fit, which one may be long enough. Memory grows
    with the length along that line or below, but for a head that is computed in chunks; so a length that
    does not fit after all is followed by half of it.
    """
    batch, tier = request.batch, "ram" if request.spec.is_cpu else "device"
    lengths = [length for part in (2, 4, 8, 16, 32, 64) if (length := batch.seq_len // part) >= SHORTEST]

    def remedy(length: int) -> Remedy:
        count = batch.num_micro_batches * (batch.seq_len // length)
        shorter = replace(batch, seq_len=length, num_micro_batches=count)
        text = f"data.seq_len={length} train.grad_accumulation={count * batch.num_ranks}"
        return Remedy(text, replace(request, anatomy=recount(seq_len=length), batch=shorter))

    if not lengths or not fits((shortest := remedy(lengths[-1])).request):
        return
    low, high, limit = least_bytes(shortest.request, tier), least_bytes(request, tier), request.limits[tier]
    longest = float(batch.seq_len)
    if low is not None and high is not None and limit is not None and high > low:
        longest = lengths[-1] + (limit - low) / (high - low) * (batch.seq_len - lengths[-1])
    tried = (remedy(length) for length in lengths[:-1] if length <= longest)
    yield next((found for found in tried if fits(found.request)), shortest)
