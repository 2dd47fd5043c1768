"""Plans of tests' runs: the best choice that is found in a moment.

Such tests ask what a plan does, not how good it is; those of the search and of `megatrain plan` have all of
it. A run of four steps would search once more after its third, as long as a run of days does. Plans of
`megatrain plan` are searched for in full, but where a test asks for a moment here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from megatrain.model.profile import timing
from megatrain.plan.search import micro_batches as looks
from megatrain.plan.search import verdict
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.search import search
from megatrain.stream.attach import resolve
from megatrain.train.planning import allocation, elastic, micro_batches, plan_report, plan_run

BUDGET = 400
"""Operations of a search: there is a plan after a few dozen."""


@contextmanager
def searched_for_a_moment() -> Iterator[None]:
    """Let runs and engines of this process search no longer, before their steps and between them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (resolve, allocation, verdict):
            patch.setattr(module, "make_plan", partial(make_plan, budget=BUDGET))
        patch.setattr(elastic, "SEARCH_OPERATIONS", BUDGET)
        patch.setattr(elastic, "MOST_BUDGET", BUDGET)
        patch.setattr(timing, "_BUDGET_S", 0.0)  # on a CPU a layer of each kind is timed first
        patch.setattr(timing, "_CACHE_BYTES", 1 << 20)
        yield


@contextmanager
def planned_for_a_moment(budget: int = BUDGET) -> Iterator[None]:
    """Let plans of this process, and looks at sizes of micro-batches, be found in a moment too."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (plan_run, plan_report, verdict):
            patch.setattr(module, "make_plan", partial(make_plan, budget=budget))
        patch.setattr(micro_batches, "search", partial(search, budget=budget))
        patch.setattr(looks, "_LOOK_OPERATIONS", budget)
        yield
