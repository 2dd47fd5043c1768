"""The cost of a small step: state streams and is updated once per step, however few tokens that is for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.config.defaults import default_rows
from megatrain.config.plan import Plan
from megatrain.plan.search.request import Request
from megatrain.plan.search.search import search

_GAIN = 1.25
"""The speed-up that makes a larger step worth a line."""

_LOOK_OPERATIONS = 1_000
"""The budget of the search for each larger step, in operations that are timed."""

_NEARLY = 0.9
"""Share of the most that there is to gain with which the smallest such step is enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargerStep:
    """A step of more tokens, up to the usual number, in more micro-batches of the same size."""

    factor: int
    """Times as many micro-batches."""
    gain: float
    """Times as fast per token."""

    def text(self, plan: Plan, setting: str) -> str:
        """Return one line: what the small step costs, and which setting makes it faster.

        Args:
            plan: The plan of the small step.
            setting: The setting that makes the step larger.
        """
        return (
            f"a step of {plan.batch.step_tokens:,} tokens is small: what takes longest is {plan.bound}; "
            f"{setting} makes training {self.gain:.1f} times faster"
        )


def larger_step(request: Request, plan: Plan) -> LargerStep | None:
    """Return the step with which training is about as fast as it gets; None: it is already, or none fits.

    Args:
        request: The request for which the plan was made.
        plan: The plan, which fits.
    """
    batch = request.batch
    row_tokens = batch.seq_len * batch.rows_each
    usual = default_rows(row_tokens, on_cpu=request.spec.is_cpu, data=None) * row_tokens
    # a micro-batch costs its products in a larger step too: where these are nearly all, nothing is looked for
    if usual < 2 * batch.step_tokens or plan.step_s < _GAIN * request.step(plan.choice).compute_s:
        return None
    found = []
    factor = 2
    while factor * batch.step_tokens <= usual:
        larger = replace(batch, num_micro_batches=factor * batch.num_micro_batches)
        best = search(replace(request, batch=larger), budget=_LOOK_OPERATIONS)
        if best is not None:
            found.append(LargerStep(factor=factor, gain=factor * plan.step_s / best.step.step_s))
        factor *= 2
    most = max((step.gain for step in found), default=0.0)
    return next((step for step in found if step.gain >= max(_GAIN, _NEARLY * most)), None)
