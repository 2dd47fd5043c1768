"""The size of micro-batches with which a step is fastest: what each size comes to is looked at, not planned.

A size bears on everything: what a layer's products reach, what stays between forward and backward, how often
weights are fetched. So each is asked what it could do by a search that ends soon, and the plan that follows
is of the size that does best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatrain.config.choice import Choice
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.request import Request
from megatrain.plan.search.search import Found, search

_LOOK_OPERATIONS = 4_000
"""The budget of the search for each size, in operations that are timed."""

_TOLERANCE, _CLOSE = 0.01, 0.002
"""The differences of step times below which the smaller of two sizes is taken, and the larger budget: of
looks, and of whole searches."""


def look(request: Request, start: tuple[int, Choice] | None = None) -> Found | None:
    """Return what a search that ends soon finds; None: nothing fits.

    Args:
        request: The request for a step.
        start: The rows of a micro-batch for which a look has found a choice, with which this one begins.
    """
    if start is not None:
        rows, choice = start
        lockstep = max(1, choice.lockstep * rows // request.batch.micro_batch_size)
        request = replace(request, start=replace(choice, lockstep=lockstep))
    return search(request, budget=_LOOK_OPERATIONS)


def is_faster(seconds: float, than_s: float, *, is_whole: bool = False) -> bool:
    """Return whether a larger size, or a smaller budget, is worth it.

    Args:
        seconds: The seconds of a step with it.
        than_s: The seconds of a step without.
        is_whole: Whether both were searched for to the end, not looked at.
    """
    return seconds < than_s * (1 - (_CLOSE if is_whole else _TOLERANCE))


def in_smaller_micro_batches(request: Request, recount: Callable[..., Anatomy]) -> Iterator[Request]:
    """Yield the same step in micro-batches of a half, a quarter, ... of the rows, down to one.

    Args:
        request: The request for a step.
        recount: A function that counts its model anew with another `micro_batch_size`.
    """
    batch = request.batch
    size, count = batch.micro_batch_size, batch.num_micro_batches
    while size % (2 * batch.rows_each) == 0:
        size, count = size // 2, count * 2
        smaller = replace(batch, micro_batch_size=size, num_micro_batches=count)
        yield replace(request, anatomy=recount(micro_batch_size=size), batch=smaller)
