"""The choices for a request: frames, and what the rest of the device's memory makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import product

from megatrain.config.choice import AUTO, Choice
from megatrain.config.policies import BASES, KEEP_ATTENTION, POLICIES, Policy
from megatrain.errors import ConfigError
from megatrain.layout import pools
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.search.filling import keep_more
from megatrain.plan.search.options import (
    chunk_counts,
    decided,
    is_allowed,
    lockstep_sizes,
    may_be_resident,
    most_fragments,
    outer_options,
    parts_in,
    slot_counts,
    stream_options,
    values_of,
)
from megatrain.plan.search.placing import (
    SMALL,
    least_sums,
    most_within,
    placed,
    placements,
    spread,
    sum_options,
)
from megatrain.plan.search.request import Request, excess, is_too_large, overflow, pools_of


class Breadth(Enum):
    """The part of the possible choices that is listed."""

    LEAST = "those that take least memory"
    COARSE = "a few that differ much, to go on from"
    MAIN = "all but other numbers of slots, and fragments"
    ALL = "all"


_PARTS = 8
"""Numbers of resident layers that are looked at for what takes least memory."""

_ROUND_TOKENS = 16_384
"""Tokens of a round behind whose compute the copies of weights hide on common links: a first guess."""


def list_choices(request: Request, extent: Breadth = Breadth.ALL) -> Iterator[Choice]:
    """Yield the choices that fit: in RAM if one does; otherwise with drives, as few bytes there as can be."""
    for tiers, smallest in _fitting(request):
        found = False
        frames_of = _frames(request, tiers, extent)
        if extent is Breadth.COARSE and "nvme" in (request.choice.boundaries, request.choice.sums):
            frames_of = _longest_rounds(request, frames_of)
        for frames in (frames_of, smallest):
            for choice in frames:
                for filled in fill(request, choice):
                    found = True
                    yield filled
            if found and extent is Breadth.COARSE:
                return
        if found:
            return
    on_drives = with_activations_on_drives(request)
    if on_drives is not None:
        yield from list_choices(on_drives, extent)


def _longest_rounds(request: Request, frames: Iterator[Choice]) -> Iterator[Choice]:
    """Yield those frames alone that make the longest rounds that the device holds.

    What waits on drives between rounds, or until the backward, costs least in long ones.
    """
    longest: set[Choice] = set()
    for frame in sorted(frames, key=lambda frame: -frame.lockstep):
        like = replace(frame, lockstep=1, num_gradient_buffers=1)
        if like not in longest and not is_too_large(request, frame):
            longest.add(like)
            yield frame


def like(request: Request, choice: Choice) -> Iterator[Choice]:
    """Yield what a choice for a similar request becomes under this one: the device is filled anew."""
    num_layers, given = len(request.anatomy.layers), request.choice
    values = {
        "resident_layers": 0,
        "mirror_resident": True,
        "gradients": ("host",) * num_layers,
        "blocks_in_ram": 0,
        "weights_in_ram": 0,
        "lockstep": min(lockstep_sizes(request), key=lambda m: abs(m - choice.lockstep)),
    }
    if given.expert_chunks not in (AUTO, choice.expert_chunks):
        parts, together = parts_in(most_fragments(request), choice.fragments, given.expert_chunks)
        values |= {"num_slots": parts + 1, "num_gradient_buffers": together + 1, "fragments": False}
    bases = dict.fromkeys([choice.activations[0], *(base.name for base in bases_of(request))])
    for base in bases if given.activations == AUTO else [""]:
        values["activations"] = (base,) * num_layers
        frame = replace(choice, **{**values, **given.for_layers(num_layers).given})
        if not frame.has_state_on_device and is_allowed(request, frame):
            yield from fill(request, frame)


def bases_of(request: Request) -> tuple[Policy, ...]:
    """Return the policies that all layers are given first.

    Rows in tiles have one more: what attention returned is read from the host by parts, and where it is not
    kept it is on the device as a whole, and attention runs twice.
    """
    return (KEEP_ATTENTION, *BASES) if have_late_rows(request) else BASES


def have_late_rows(request: Request) -> bool:
    """Return whether rows pass in tiles, so that what waits elsewhere comes back by parts."""
    return any(layer.late for layer in request.anatomy.layers)


def first_fit(request: Request) -> Choice | None:
    """Return a choice that fits, one that takes little memory; None: none does."""
    found = _first_fit(request)
    if found is not None:
        return found
    return next((fit for asked in on_device_alone(request) if (fit := _first_fit(asked))), None)


def lacks_ram(request: Request) -> bool:
    """Return whether RAM is what some choice without drives lacks, and state on the device alone leaves more.

    Asked of choices that differ much; as any of them may be the fastest, so may one that leaves RAM.
    """
    if request.choice.mirror_resident is False or not _may_be_alone(request):
        return False
    frames = _frames(request, frozenset(), Breadth.COARSE)
    return any("ram" in overflow(request, frame) for frame in frames)


def on_device_alone(request: Request) -> list[Request]:
    """Return the same with the state of resident blocks on the device and nowhere else, where that may help.

    As many layers as make enough room in RAM are resident; then as many as the device holds, and half-way
    between. None where that is decided otherwise, or fits nowhere. They are found once for a request.
    """
    if "on_device_alone" not in request.known:
        request.known["on_device_alone"] = _on_device_alone(request)
    found: list[Request] = request.known["on_device_alone"]
    return found


def _on_device_alone(request: Request) -> list[Request]:
    if not _may_be_alone(request):
        return []
    if request.choice.resident_layers != AUTO:
        return [_alone(request, request.choice.resident_layers)]
    most = _most_alone(request)
    fewest = next((n for n in range(1, most + 1) if _first_fit(_alone(request, n))), None)
    if fewest is None:
        return []
    fitting = [n for n in {(fewest + most) // 2, most} if n > fewest and _first_fit(_alone(request, n))]
    return [_alone(request, n) for n in [fewest, *sorted(fitting)]]


def _may_be_alone(request: Request) -> bool:
    """Return whether state may be on the device and nowhere else, and nobody has said otherwise."""
    given, spec = request.choice, request.spec
    is_open = given.mirror_resident in (AUTO, False) and given.tiers in (AUTO, frozenset())
    needs_drives = request.commits or "nvme" in (given.boundaries, given.sums)
    return is_open and not needs_drives and spec.has_accelerator


def _alone(request: Request, num_layers: int) -> Request:
    decided = {"mirror_resident": False, "resident_layers": num_layers, "tiers": frozenset()}
    return replace(request, choice=replace(request.choice, **decided))  # type: ignore[arg-type]


def _most_alone(request: Request) -> int:
    """Return the largest number of layers of which the device holds all state beside the rest of a step."""

    def are_too_many(number: int) -> bool:
        frames = _frames(_alone(request, number), frozenset(), Breadth.LEAST)
        return all(is_too_large(request, frame) for frame in frames)

    return most_within(len(request.anatomy.layers), lambda number: 2 * are_too_many(number) - 1)


def _first_fit(request: Request) -> Choice | None:
    for tiers in _tiers(request):
        for frame in _frames(request, tiers, Breadth.LEAST) if _has_ram(request, tiers) else ():
            found = _placed_if_it_fits(request, frame)
            if found is not None:
                return found
    on_drives = with_activations_on_drives(request)
    return None if on_drives is None else _first_fit(on_drives)


def _fitting(request: Request) -> list[tuple[frozenset[tuple[str, str]], list[Choice]]]:
    """Return the tiers with which anything fits, with what takes least memory there, once for a request."""
    if "fitting" not in request.known:
        possible = [tiers for tiers in _tiers(request) if _has_ram(request, tiers)]
        smallest = [(tiers, list(_frames(request, tiers, Breadth.LEAST))) for tiers in possible]
        request.known["fitting"] = [
            (tiers, frames)
            for tiers, frames in smallest
            if any(_placed_if_it_fits(request, frame) for frame in frames)
        ]
    found: list[tuple[frozenset[tuple[str, str]], list[Choice]]] = request.known["fitting"]
    return found


def _has_ram(request: Request, tiers: frozenset[tuple[str, str]]) -> bool:
    """Return whether RAM holds the planes of all blocks not on drives, which every choice takes there."""
    limit, there = request.limits["ram"], dict(tiers)
    assert limit is not None
    if request.choice.mirror_resident is False:
        return True
    totals = BlockSums.of(request.anatomy, Choice(fragments=False, expert_chunks=1))
    kept, nobody = totals.kept_by_node(request.batch) or totals.totals, totals.totals[:0]
    weights = nobody if there.get("working") == "nvme" else totals.totals[:]
    state = nobody if there.get("moments") == "nvme" else kept[:]
    return sum(pools.state_planes(weights, state, request.optimizer).values()) <= limit


def _placed_if_it_fits(request: Request, frame: Choice) -> Choice | None:
    """Return a frame with gradients and state where they fit; None: they do not, or its device overflows."""
    if is_too_large(request, frame):
        return None
    found = placed(request, frame)
    return None if overflow(request, found) else found


def least(request: Request) -> Choice:
    """Return the choice that is least over the limits, with nothing resident and nothing kept.

    Raises:
        ConfigError: The user's settings exclude every choice.
    """

    def shortage(choice: Choice) -> tuple[float, ...]:
        over, limits = overflow(request, choice), request.limits
        share = sum(nbytes / max(1, limits[tier] or 1) for tier, nbytes in over.items())
        return len(over), share, len(choice.tiers)  # too little of one tier before too little of two

    frames = list(_smallest(request))
    if not frames:
        given = ", ".join(f"{name} {value}" for name, value in request.choice.given.items())
        raise ConfigError(
            f"these settings exclude each other: {given}; with fragments, num_slots and num_gradient_buffers "
            "must be at least the parts of a layer, gradients wait on the device in a single round only, or "
            "with sums on nvme, which needs drives as boundaries there do, moments in fp32 and no resident "
            "layer, and one run of one rank"
        )
    return min((placed(request, frame) for frame in frames), key=shortage)


def least_bytes(request: Request, tier: str) -> int | None:
    """Return the fewest bytes of a tier with which a choice fits, the others being as they are; None: none.

    Args:
        request: The request; its limit of this tier does not count.
        tier: The tier: `device`, `ram` or `nvme`.
    """
    needs = [
        sum(pool.nbytes for pool in pools_of(request, frame) if pool.tier == tier)
        for bare in _smallest(request)
        for frame in spread(request, bare)
        if not overflow(request, frame).keys() - {tier}
    ]
    return min(needs, default=None)


def least_held(request: Request, tier: str) -> int | None:
    """Return the fewest bytes of a tier that no shorter sequence and no smaller batch saves; None as above.

    That is what is allocated, and the gradients of a streamed layer, or of its largest part, as they leave;
    in a round of all micro-batches also their boundaries, as a step keeps its tokens.
    """
    count = request.batch.num_micro_batches

    def leaving(choice: Choice) -> int:
        sums = BlockSums.of(request.anatomy, choice)
        return max(sizes.gradient_bytes for sizes in sums.totals.sizes[: sums.first_outer])

    needs = [
        sum(
            pool.nbytes
            for pool in pools_of(request, frame)
            if pool.tier == tier
            and (pool.is_exact or (pool.name == "boundaries" and 1 < count <= frame.lockstep))
        )
        + leaving(frame)
        for bare in _smallest(request)
        for frame in spread(request, bare)
        if not overflow(request, frame).keys() - {tier}
    ]
    return min(needs, default=None)


def with_activations_on_drives(request: Request) -> Request | None:
    """Return the same with saved activations on drives; None: there are none, or it is set."""
    if not request.may_use_drives or request.choice.boundaries != AUTO:
        return None
    return replace(request, choice=replace(request.choice, boundaries="nvme"))


def _smallest(request: Request) -> Iterator[Choice]:
    """Yield all choices that take least memory, with saved activations on drives too, nothing placed."""
    on_drives = with_activations_on_drives(request)
    for asked in [request] if on_drives is None else [request, on_drives]:
        for tiers in _tiers(asked):
            yield from _frames(asked, tiers, Breadth.LEAST)
    if _may_be_alone(request) and request.choice.resident_layers == AUTO:
        most = _most_alone(request)
        # what leaves least in RAM may be fewer, beside which gradients wait on the device
        for number in sorted({-(-most * part // _PARTS) for part in range(1, _PARTS + 1)} - {0}):
            yield from _frames(_alone(request, number), frozenset(), Breadth.LEAST)


def _tiers(request: Request) -> list[frozenset[tuple[str, str]]]:
    if request.choice.tiers != AUTO:
        return [request.choice.tiers]
    if not request.may_use_drives:
        return [frozenset()]
    moments = frozenset({("remainder", "nvme"), ("moments", "nvme")})
    on_drives = [moments, moments | {("working", "nvme")}]  # of which RAM takes what fits
    return on_drives if request.commits else [frozenset(), *on_drives]


def _frames(request: Request, tiers: frozenset[tuple[str, str]], extent: Breadth) -> Iterator[Choice]:
    """Yield choices with nothing resident and nothing kept: what is left of the device fills them."""
    anatomy, batch = request.anatomy, request.batch
    num_layers = len(anatomy.layers)
    given = request.choice.for_layers(num_layers)
    most = most_fragments(request)
    bases: list[tuple[str, ...]] = [given.activations]
    if given.activations == AUTO:
        bases = [(base.name,) * num_layers for base in bases_of(request)]
    is_least = extent is Breadth.LEAST
    is_coarse = extent is Breadth.COARSE
    locksteps = lockstep_sizes(request)
    if is_least and (batch.num_runs > 1 or batch.runs_are_rounds):
        pass  # more rounds leave more partial sums, and fewer have more boundaries: the least may be between
    elif is_least:
        locksteps = [locksteps[0], 1]
    elif is_coarse:
        wanted = _ROUND_TOKENS // (2 if given.sums == "host" else 1)  # without sums, half as much to hide
        enough = min(locksteps, key=lambda m: abs(m * request.anatomy.tokens - wanted))
        if "nvme" not in (given.boundaries, given.sums):
            locksteps = [locksteps[0], enough]
    comes_apart = most > 1 and extent in (Breadth.LEAST, Breadth.ALL)
    whole = [
        (fragments, 1) for fragments in values_of(given.fragments, [False, True] if comes_apart else [False])
    ]
    chunked = [(False, number) for number in chunk_counts(request) if is_least or given.expert_chunks != AUTO]
    splits = [split for split in (*whole, *chunked) if given.expert_chunks in (AUTO, split[1])]
    for split, lockstep, boundaries, updates, outer, streams, sums, activations in product(
        splits,
        values_of(given.lockstep, sorted(set(locksteps))),
        values_of(given.boundaries, ["device", "host"]),
        values_of(given.updates, ["deferred"] if request.clips else ["deferred", "immediate"]),
        values_of(given.outer_resident, [False] if is_least else outer_options(request)),
        values_of(given.outer_streams, stream_options(request) if is_least else [False]),
        values_of(given.sums, least_sums(request) if is_least else sum_options(request)),
        bases,
    ):
        base = POLICIES[activations[0]]
        if given.activations == AUTO and (
            (boundaries == "host" and not base.reruns) or (is_least and base.stays_whole)
        ):
            continue
        if given.sums == AUTO and sums != "device" and lockstep >= batch.num_micro_batches:
            continue  # one round has nothing to add
        fragments, chunks = split
        parts, together = parts_in(most, fragments, chunks)
        default_buffers = together + 1 if lockstep > 1 and not is_least else together
        numbers = slot_counts(num_layers * parts, parts)
        numbers = {Breadth.LEAST: [parts], Breadth.ALL: numbers}.get(extent, [parts + 1])
        for slots in values_of(given.num_slots, numbers):
            if slots < parts:
                continue
            choice = Choice(
                num_slots=slots,
                num_gradient_buffers=decided(given.num_gradient_buffers, default_buffers),
                activations=activations,
                boundaries=boundaries,
                fragments=fragments,
                expert_chunks=chunks,
                resident_layers=decided(given.resident_layers, 0),
                outer_resident=outer,
                mirror_resident=decided(given.mirror_resident, True),
                outer_streams=streams,
                lockstep=lockstep,
                updates=updates,
                gradients=decided(given.gradients, ("host",) * num_layers),
                sums=sums,
                tiers=tiers,
                blocks_in_ram=decided(given.blocks_in_ram, 0),
                weights_in_ram=decided(given.weights_in_ram, 0),
                head_chunk_tokens=decided(given.head_chunk_tokens, None),
            )
            if is_allowed(request, choice):
                yield choice


def fill(request: Request, frame: Choice) -> Iterator[Choice]:
    """Yield what a frame becomes when the rest of the device holds resident layers and kept activations."""
    for placement in placements(request, frame):
        if not overflow(request, placement):
            yield from _filled(request, placement)


def _filled(request: Request, frame: Choice) -> Iterator[Choice]:
    num_layers = len(request.anatomy.layers)
    given = request.choice
    if given.resident_layers != AUTO:
        residents: Sequence[int] = [given.resident_layers]
    elif request.spec.is_cpu or not may_be_resident(request, frame):
        residents = [0]
    else:
        most = most_within(num_layers, lambda n: excess(request, replace(frame, resident_layers=n)))
        residents = sorted(set(range(most + 1)) if num_layers <= SMALL else {0, most // 2, most})
    for number in residents:
        choice = replace(frame, resident_layers=number)
        if overflow(request, choice):
            continue
        yield choice
        if given.activations == AUTO:
            yield from keep_more(request, choice)
