"""What `emulated.py` measures in rows, the figures that follow, and what is claimed of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.overlap import work as model
from benchmarks.overlap.published import TOLERANCE, Prediction
from benchmarks.overlap.replay import Measured

MAIN = "h100-pcie5"
K = 1024
SCHEDULES = {"deferred": 32 * K, "immediate": 16 * K}
"""Ours, with the tokens per step from which on a step is to be near its bound."""
ALLOWED = {"step_over_bound": 1.05, "depth_spread": 0.03, "device_idle": 0.05}
WANTED = {"speedup_over_megatrain_schedule": 1.8, "optimizer_hidden": 0.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table."""

    machine: str
    schedule: str
    """deferred, immediate, megatrain, zero3."""
    num_blocks: int
    tokens: int
    num_micro_batches: int
    keeps: bool = False
    head_in_turn: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is our schedule."""
        return self.schedule in SCHEDULES

    @property
    def label(self) -> str:
        """Name in the table."""
        name = "ours, " + self.schedule if self.is_ours else self.schedule
        return (
            name + (", keep" if self.keeps else "") + (", head last (not built)" if self.head_in_turn else "")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A case and what was measured."""

    case: Case
    measured: Measured
    details: dict[str, object]
    costs: model.Costs

    def row(self) -> dict[str, Any]:
        """Return everything as plain values."""
        measured = self.measured
        return {
            **asdict(self.case),
            **asdict(measured),
            "bound_s": measured.bound_s,
            "bound_by": measured.bound_by,
            "step_over_bound": measured.over_bound,
            "step_over_arithmetic": measured.step_s / measured.arithmetic_s,
            "tokens_per_s": self.case.tokens / measured.step_s,
            "model_flops_per_s": self.costs.model_flops(self.case.tokens) / measured.step_s,
            **self.details,
        }


def key_figures(results: list[Result]) -> dict[str, float | None]:
    """Return the figures that the docstring names; None where the part was not run."""
    large = [
        r
        for r in results
        if r.case.machine == MAIN and r.case.schedule == "deferred" and r.case.tokens >= 32 * K
    ]
    grid = [r for r in large if not r.case.keeps]
    spreads = []
    for tokens in {r.case.tokens for r in grid}:
        depths = {r.case.num_blocks: r.measured.over_bound for r in grid if r.case.tokens == tokens}
        spreads += [max(depths.values()) / min(depths.values()) - 1] if len(depths) > 1 else []
    main = {
        (r.case.schedule, r.case.keeps): r.measured
        for r in results
        if r.case.machine == MAIN and r.case.tokens == 32 * K and r.case.num_micro_batches == 4
    }
    mine = main.get(("deferred", False))
    figures: dict[str, float | None] = {
        "step_over_bound": max((r.measured.over_bound for r in grid), default=None),
        "depth_spread": max(spreads, default=None),
        "optimizer_hidden": mine.optimizer_hidden if mine else None,
    }
    for rival in ("megatrain", "zero3"):
        for keeps in (False, True):
            theirs = main.get((rival, keeps)) or main.get((rival, False))
            own = main.get(("deferred", keeps))
            ratio = theirs.step_s / own.step_s if theirs and own else None
            figures[f"speedup_over_{rival}_schedule" + ("_keep" if keeps else "")] = ratio
    return figures


def check_claims(
    results: list[Result], figures: dict[str, float | None], rows: list[Prediction]
) -> Iterator[dict[str, Any]]:
    """Hold what was measured against what is claimed."""

    def claim(
        text: str, value: float | None, limit: float, *, at_most: bool, why: str = ""
    ) -> Iterator[dict[str, Any]]:
        if value is not None:
            met = value <= limit if at_most else value >= limit
            yield {"claim": text, "measured": value, "limit": limit, "met": met, "why": "" if met else why}

    grid = [r for r in results if r.case.is_ours and not r.case.keeps and not r.case.head_in_turn]
    for schedule, least in SCHEDULES.items():
        worst = max(
            (
                r.measured.over_bound
                for r in grid
                if r.case.machine == MAIN and r.case.schedule == schedule and r.case.tokens >= least
            ),
            default=None,
        )
        text = f"{MAIN}, {schedule}: step over bound from {least // K}k tokens"
        yield from claim(text, worst, ALLOWED["step_over_bound"], at_most=True)
    text = f"{MAIN}: spread of step over bound over depths"
    yield from claim(text, figures["depth_spread"], ALLOWED["depth_spread"], at_most=True)
    for machine in dict.fromkeys(r.case.machine for r in grid):
        allowed = [
            r for r in grid if r.case.machine == machine and r.measured.bound_by == "forward + backward"
        ]
        worst_row = max(allowed, key=lambda r: r.measured.device_idle, default=None)
        value = worst_row.measured.device_idle if worst_row else None
        why = why_idle(worst_row) if worst_row else ""
        text = f"{machine}: device idle where compute is the bound"
        yield from claim(text, value, ALLOWED["device_idle"], at_most=True, why=why)
    for suffix, what in (("", "equal recompute"), ("_keep", "keeping what fits")):
        name = "speedup_over_megatrain_schedule"
        text = f"{MAIN}, 32k tokens in 4 micro-batches: over MegaTrain's schedule, {what}"
        why = why_no_faster(results, keeps=bool(suffix))
        yield from claim(text, figures[name + suffix], WANTED[name], at_most=False, why=why)
    text = f"{MAIN}, 32k tokens in 4 micro-batches: optimizer hidden"
    yield from claim(text, figures["optimizer_hidden"], WANTED["optimizer_hidden"], at_most=False)
    for system in dict.fromkeys(row.system for row in rows):
        errors = [abs(row.error) for row in rows if row.system == system]
        why = "; ".join(dict.fromkeys(row.why for row in rows if row.system == system and row.why))
        text = f"{system}: worst error of {len(errors)} predicted row(s)"
        yield from claim(text, max(errors), TOLERANCE, at_most=True, why=why)


def why_idle(result: Result) -> str:
    """Explain a row whose device idles although all compute together takes longest."""
    case, costs = result.case, result.costs
    parts = [f"{case.schedule}, {case.num_blocks} blocks, {case.tokens // K}k tokens"]
    forward_s = costs.forward(case.tokens) / costs.rates.compute_flops_per_s
    update_s = model.UPDATE_BYTES * costs.shape.block_params / costs.rates.host_bytes_per_s
    if 2 * costs.shape.block_params / costs.rates.h2d_bytes_per_s > forward_s:
        parts.append("a block's fetch takes longer than its forward")
    if case.schedule == "immediate" and update_s > 3 * forward_s:
        parts.append("updates take longer than the backward, and the next forward's first block comes last")
    return "; ".join(parts)


def why_no_faster(results: list[Result], *, keeps: bool) -> str:
    """Say how much faster than the rival any order of our operations could be."""
    rows = {
        (r.case.schedule, r.case.keeps): r.measured
        for r in results
        if r.case.machine == MAIN and r.case.tokens == 32 * K and r.case.num_micro_batches == 4
    }
    own, theirs = rows.get(("deferred", keeps)), rows.get(("megatrain", False))
    if own is None or theirs is None:
        return ""
    return f"at our bound ({own.bound_by}) it would be {theirs.step_s / own.bound_s:.2f}: no order gives more"
