"""What `megatrain plan --longest` prints, in words and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatrain.config.sizes import binary
from megatrain.model.sequence.range import OF_RUN
from megatrain.plan.cost.economics import Economics
from megatrain.train.planning.longest.find import Longest
from megatrain.train.planning.plan_json import plan_json
from megatrain.train.planning.plan_report import (
    MEMORIES,
    head,
    money_of,
    number_text,
    row,
    seconds_text,
    settings_text,
)


def longest_report(found: Longest, *, price_per_hour_usd: float | None = None, as_json: bool = False) -> str:
    """Return what `megatrain plan --longest` prints.

    Args:
        found: The longest row.
        price_per_hour_usd: The price of the whole machine per hour; None: see `economics`.
        as_json: Whether to return one JSON object instead of text.
    """
    planned = found.planned
    money = money_of(planned, price_per_hour_usd)
    if as_json:
        return json.dumps({**plan_json(planned, money, []), "longest": longest_json(found)})
    return "\n".join([*head(planned), "", *_rows(found, money)])


def _rows(found: Longest, money: Economics) -> Iterator[str]:
    planned = found.planned
    plan, lengths = planned.plan, found.lengths
    over = ""
    if lengths.too_long is not None:
        step = lengths.too_long - found.longest
        over = f", to a precision of {step:,}: {lengths.too_long:,} do not fit"
    yield from row("longest", f"rows of {found.longest:,} tokens{over}")
    yield from row(
        "speed",
        f"{number_text(plan.tokens_per_s)} tokens/s, {seconds_text(plan.step_s)} per step of "
        f"{plan.batch.step_tokens:,} tokens, bound by {plan.bound}",
    )
    yield from row("full", full_text(found))
    if money.drive_written:
        lasts = "of how many they bear is not known"
        if money.drive_days is not None:
            lasts = f"{money.drive_days:,.0f} days to rated endurance"
        yield from row(
            "wear", f"{binary(money.drive_written_per_day)} written to the drives per day; {lasts}"
        )
    yield from row("rope", _rope_text(found))
    for number, way in enumerate(found.ways):
        yield from row("or" if number else "longer", f"{way.text}, for rows of {way.seq_len:,} tokens")
    if found.beyond is not None and not found.ways:
        yield from row("longer", "no memory, no drive and no other device is enough for rows twice as long")
    yield from row("verdict", planned.verdict.text)
    for number, text in enumerate(planned.spares):
        yield from row("or" if number else "spare", text)
    for reason in planned.verdict.reasons:
        yield from row("but", reason)
    yield from row("setting", f"{_length_settings(found)} {settings_text(planned)}")
    if planned.hint:
        yield from row("faster", planned.hint)
    for note in planned.notes:
        yield from row("note", note)


def full_text(found: Longest) -> str:
    """Return what is in the way of longer rows: the tier, its largest pool that grows, and the limit."""
    if found.refused:
        return f"nothing, but {found.refused}"
    if found.full is None or found.beyond is None:
        return "nothing: all lengths that may be fit"
    pool, plan, tier = found.full, found.beyond, found.full.tier
    return (
        f"{MEMORIES[tier]}: rows of {found.lengths.too_long:,} tokens need {binary(plan.tier_bytes(tier))}, "
        f"{binary(pool.nbytes)} of it for {pool.name}, of {binary(plan.limits[tier])}"
    )


def _length_settings(found: Longest) -> str:
    config, factor = found.planned.config, _factor(found)
    scaling = "" if factor is None else f"{OF_RUN.format(factor=factor)} "
    tokens = config.train.tokens_per_step
    return (
        f"{scaling}data.seq_len={config.data.seq_len} train.micro_batch_size=1 train.tokens_per_step={tokens}"
    )


def _factor(found: Longest) -> int | None:
    """Return the factor of the scaling that the longest row needs; None: it is within the model's range."""
    rows = found.rows
    if rows.longest is None or rows.native is None or found.longest <= rows.longest:
        return None
    return math.ceil(found.longest / rows.native)


def _rope_text(found: Longest) -> str:
    rows = found.rows
    if rows.native is None or rows.longest is None:
        return "the model names no longest row"
    if not rows.rope_type:
        return f"the model has {rows.longest:,} positions and takes no longer rows"
    text = f"positions of rows of more than {rows.native:,} tokens have to be scaled"
    if rows.longest > rows.native:
        text += f", and are for up to {rows.longest:,} ({rows.scaling})"
    if found.longest <= rows.native:
        return f"{text}; these rows are shorter"
    factor = _factor(found)
    return text if factor is None else f"{text}; these rows need a factor of {factor}"


def longest_json(found: Longest) -> dict[str, Any]:
    """Return the longest row and what is in its way as plain values: tokens and bytes."""
    full, plan = found.full, found.beyond
    return {
        "seq_len": found.longest,
        "too_long": found.lengths.too_long,
        "full": None
        if full is None or plan is None
        else {
            "tier": full.tier,
            "pool": full.name,
            "pool_bytes": full.nbytes,
            "need_bytes": plan.tier_bytes(full.tier),
            "limit_bytes": plan.limits[full.tier],
            "problem": plan.problem,
        },
        "refused": found.refused or None,
        "native": found.rows.native,
        "range": found.rows.longest,
        "rope_factor": _factor(found),
        "longer": [asdict(way) for way in found.ways],
    }
