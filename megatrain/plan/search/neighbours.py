"""The choices that differ in one question from a good choice, with which a search goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from megatrain.config.choice import AUTO, Choice
from megatrain.config.policies import KEEP, POLICIES
from megatrain.plan.search.choices import bases_of, fill
from megatrain.plan.search.filling import keep_more, possible
from megatrain.plan.search.options import (
    decided,
    is_allowed,
    lockstep_sizes,
    may_be_resident,
    most_fragments,
    outer_options,
    parts_of,
    slot_counts,
    stream_options,
    values_of,
)
from megatrain.plan.search.placing import SMALL, place_in_ram
from megatrain.plan.search.request import Request


def neighbours(request: Request, choice: Choice) -> Iterator[Choice]:
    """Yield choices that differ in one question from a good one, with the device filled anew.

    Of a small model also those that differ in the policies of any layers, with everything else as it is. Not
    all of them fit: to find out takes longer than to see that they cannot be faster.
    """
    num_layers, given = len(request.anatomy.layers), request.choice
    most = most_fragments(request)
    parts, sums = parts_of(request, choice)
    changes: dict[str, Sequence[object]] = {
        "num_slots": slot_counts(num_layers * parts, parts),
        "num_gradient_buffers": [sums, sums + 1],
        "updates": ["deferred"] if request.clips else ["deferred", "immediate"],
        "boundaries": ["device", "host"],
        "outer_resident": outer_options(request),
        "outer_streams": stream_options(request),
        "lockstep": lockstep_sizes(request),
    }
    is_open = given.activations == AUTO
    for base in dict.fromkeys(choice.activations) if is_open else [""]:
        activations = (base,) * num_layers if is_open else choice.activations
        frame = replace(choice, activations=activations, resident_layers=decided(given.resident_layers, 0))
        for name, values in changes.items():
            for value in values if getattr(given, name) == AUTO else ():
                if value != getattr(choice, name):
                    yield from _changed(request, frame, name, value, sums)
        if num_layers <= SMALL and AUTO == given.lockstep == given.num_slots == given.num_gradient_buffers:
            # other rounds want other buffers: where it takes no time, they are looked at together
            names = ("lockstep", "num_slots", "num_gradient_buffers")
            for together in product(*(changes[name] for name in names)):
                changed = replace(frame, **dict(zip(names, together, strict=True)))  # type: ignore[arg-type]
                if together[0] != choice.lockstep and is_allowed(request, changed):
                    yield from fill(request, changed)
        if _may_split(request, choice):
            yield from _resplit(request, frame, 1 if choice.fragments else most)
        if given.resident_layers == AUTO and may_be_resident(request, choice) and not request.spec.is_cpu:
            # what is resident updates on the device: the best share of it is one of layers and outer blocks
            outers = values_of(given.outer_resident, outer_options(request))
            for change, outer in product((-1, 0, 1), outers):
                number = choice.resident_layers + change
                changed = replace(frame, resident_layers=number, outer_resident=outer)
                is_new = 0 <= number <= num_layers and (change, outer) != (0, choice.outer_resident)
                if not is_new or not is_allowed(request, changed):
                    continue
                if is_open:
                    yield from keep_more(request, changed)
                else:
                    yield changed
    yield from _thinned(request, choice)
    if num_layers <= SMALL and is_open:
        yield from _mixed(request, choice)
        if _may_split(request, choice):
            for split in _splits(request, choice, 1 if choice.fragments else most):
                placed = place_in_ram(request, split)
                yield from _mixed(request, placed, residents=[choice.resident_layers])


def _may_split(request: Request, choice: Choice) -> bool:
    """Return whether layers may come in fragments, or whole again."""
    is_open = request.choice.fragments == AUTO and choice.expert_chunks == 1
    return is_open and most_fragments(request) > 1


def _changed(request: Request, frame: Choice, name: str, value: object, sums: int) -> Iterator[Choice]:
    """Yield a frame with one field changed, and what follows from it."""
    changed = replace(frame, **{name: value})  # type: ignore[arg-type]
    if name == "lockstep" and request.choice.num_gradient_buffers == AUTO:
        changed = replace(changed, num_gradient_buffers=sums + (changed.lockstep > 1))
    if name == "updates" and value == "immediate":
        changed = replace(changed, gradients=("host",) * len(changed.activations))
    if is_allowed(request, changed):
        yield from fill(request, changed)


def _resplit(request: Request, frame: Choice, parts: int) -> Iterator[Choice]:
    """Yield a frame whose layers stream in so many parts, with the device filled anew."""
    for split in _splits(request, frame, parts):
        yield from fill(request, split)


def _splits(request: Request, frame: Choice, parts: int) -> Iterator[Choice]:
    """Yield a choice whose layers stream in so many parts, through fewer slots and more; not placed yet."""
    given = request.choice
    buffers = decided(given.num_gradient_buffers, parts + (frame.lockstep > 1))
    for slots in values_of(given.num_slots, [parts + 1, parts]):
        split = replace(frame, fragments=parts > 1, num_slots=slots, num_gradient_buffers=buffers)
        if given.blocks_in_ram == AUTO:
            split = replace(split, blocks_in_ram=0, weights_in_ram=0)  # they counted other blocks
        if slots >= parts and is_allowed(request, split):
            yield split


def _mixed(request: Request, choice: Choice, residents: Sequence[int] = ()) -> Iterator[Choice]:
    """Yield every combination of policies of the layers, whether or not it fits.

    Args:
        request: The request to plan.
        choice: The choice that says everything else.
        residents: The numbers of resident layers; none: as many as the choice has, one less and one more.
    """
    policies = [policy.name for policy in possible(request, POLICIES.values())]
    numbers = set(residents) or {choice.resident_layers}
    is_free = request.choice.resident_layers == AUTO and not request.spec.is_cpu
    if is_free and may_be_resident(request, choice) and not residents:
        numbers |= {choice.resident_layers - 1, choice.resident_layers + 1}
    for number in sorted(n for n in numbers if 0 <= n <= len(choice.activations)):
        for activations in product(policies, repeat=len(choice.activations)):
            yield replace(choice, activations=activations, resident_layers=number)


def _thinned(request: Request, choice: Choice) -> Iterator[Choice]:
    """Yield choices that leave device memory free: fewer resident layers, and fewer of the last ones kept.

    More is nearly always faster, but not always: a timetable is a packing, and a copy that is spared in one
    place may delay another. So a choice that fits in less memory is looked at where there is more, too.
    """
    given = request.choice
    num_layers = len(choice.activations)
    residents, kept = choice.resident_layers, 0
    while kept < num_layers and choice.policies[num_layers - 1 - kept].stays_whole:
        kept += 1
    numbers = {residents} if given.resident_layers != AUTO else {residents, residents - 1, residents // 2}
    counts = {kept, kept - 1, kept // 2}
    bases = [choice.activations[0]]
    if choice.boundaries != "host":
        bases = [
            policy.name for policy in bases_of(request) if policy.keeps_boundary and not policy.stays_whole
        ]
    for number in sorted(n for n in numbers if n >= 0):
        if given.activations != AUTO:
            yield replace(choice, resident_layers=number)
            continue
        for count, base in product(sorted(n for n in counts if n >= 0), bases):
            activations = (*[base] * (num_layers - count), *[KEEP.name] * count)
            yield replace(choice, activations=activations, resident_layers=number)
