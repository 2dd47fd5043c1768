"""The activations that the last layers of a choice keep in the memory that is left of the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from megatrain.config.choice import AUTO, Choice
from megatrain.config.policies import FILLING, POLICIES, REFINING, Policy
from megatrain.plan.search.placing import SMALL, most_within
from megatrain.plan.search.request import Request, excess, overflow


def refined(request: Request, choice: Choice) -> Iterator[Choice]:
    """Yield what becomes of a choice when policies that are tried last have a part of its layers."""
    policies = {policy.name for policy in possible(request, REFINING) if policy.refines}
    if request.choice.activations != AUTO or not policies:
        return
    frame = replace(choice, activations=choice.activations[:1] * len(choice.activations))
    for candidate in keep_more(request, frame, REFINING):
        if not policies.isdisjoint(candidate.activations):
            yield candidate


def keep_more(request: Request, choice: Choice, policies: Sequence[Policy] = FILLING) -> Iterator[Choice]:
    """Yield choices whose last layers keep more than the others: backward begins with them."""
    num_layers = len(request.anatomy.layers)
    if POLICIES[choice.activations[0]].stays_whole:
        return
    filling = possible(request, policies)
    if num_layers <= SMALL:
        for counts in product(range(num_layers + 1), repeat=len(filling)):
            if not 0 < sum(counts) <= num_layers:
                continue
            candidate = choice
            for place, policy in enumerate(filling):
                candidate = _with_last(candidate, policy, sum(counts[place:]))
            if not overflow(request, candidate):
                yield candidate
        return
    for place, policy in enumerate(filling):
        most, filled = _filled_with(request, choice, policy, num_layers)
        if most:
            yield filled
        for richer in filling[place + 1 :] if most else ():
            more, mixed = _filled_with(request, filled, richer, most)
            if more:
                yield mixed


def _filled_with(request: Request, choice: Choice, policy: Policy, most: int) -> tuple[int, Choice]:
    """Return how many of the last layers, up to `most`, have room for a policy, and the choice with that."""
    count = most_within(most, lambda number: excess(request, _with_last(choice, policy, number)))
    return count, _with_last(choice, policy, count)


def _with_last(choice: Choice, policy: Policy, count: int) -> Choice:
    """Return a choice whose last `count` layers have a policy."""
    first = choice.activations[: len(choice.activations) - count]
    return replace(choice, activations=(*first, *[policy.name] * count))


def possible(request: Request, policies: Iterable[Policy]) -> list[Policy]:
    """Return those of some policies that the layers of a request can have, which may be compiled."""
    return [policy for policy in policies if not (request.compiles and policy.compile_problem)]
