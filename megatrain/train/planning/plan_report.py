"""The report of a plan in words and as JSON: memory, the time of a step, the cost of a token budget."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import wrap

from megatrain.config.choice import KEYS
from megatrain.config.plan import Plan, Pool
from megatrain.config.sizes import binary, counted
from megatrain.hardware import GIB
from megatrain.plan.cost.economics import Economics, economics
from megatrain.plan.search.least_memory import enough_drives, enough_ram
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from megatrain.train.caller import Progress
from megatrain.train.planning.plan_json import plan_json, policy
from megatrain.train.planning.plan_run import Planned
from megatrain.train.records.metrics import format_count, format_duration

_WIDTH = 110
_TINY = 1e-3
"""The share of a tier's need below which pools are not listed one by one."""
_TIERS = {"device": "device", "ram": "host", "nvme": "drives"}
MEMORIES = {"device": "device memory", "ram": "host memory", "nvme": "room on drives"}


def report(
    planned: Planned,
    *,
    price_per_hour_usd: float | None = None,
    as_json: bool = False,
    explains: bool = False,
    progress: Progress = lambda doing: None,
) -> str:
    """Return what `megatrain plan` prints.

    Args:
        planned: The plan.
        price_per_hour_usd: The price of the whole machine per hour; None: see `economics`.
        as_json: Whether to return one JSON object instead of text.
        explains: Whether to explain the choice, and what would be faster.
        progress: The function that is told of each slow operation before it begins.
    """
    money = money_of(planned, price_per_hour_usd)
    lines = []
    if explains:
        progress("planning what would be faster")
        lines = explain(planned)
    return json.dumps(plan_json(planned, money, lines)) if as_json else plan_text(planned, money, lines)


def money_of(planned: Planned, price_per_hour_usd: float | None) -> Economics:
    """Return what a planned run costs; the price is that of the whole machine, None: see `economics`."""
    request = planned.request
    return economics(
        planned.plan,
        request.spec,
        request.anatomy,
        tokens=planned.tokens,
        optimizer=request.optimizer,
        price_per_hour_usd=price_per_hour_usd,
    )


def plan_text(planned: Planned, money: Economics, lines: list[str]) -> str:
    """Return a plan as a page of text; the arguments are those of `plan_json`."""
    plan = planned.plan
    rows = [*head(planned), "", *_tiers(planned)]
    if plan.fits:  # a plan that does not fit would not run
        rows += [*_step(planned), *_watch(planned), *_total(money)]
        if planned.verdict.wear is None:
            rows += _ways("spare", planned.spares)
    rows += _verdict(planned)
    if planned.space is not None:
        rows += row("saves", planned.space.risk)
        rows += row("room", planned.space.text)
        if planned.space.warning:
            rows += row("but", planned.space.warning)
    if plan.fits:
        rows += row("stop", planned.stop.text)
        rows += row("setting", settings_text(planned))
    if planned.hint:
        rows += row("faster", planned.hint)
    for note in planned.notes:
        rows += row("note", note)
    for line in lines:
        rows += row("why", line)
    return "\n".join(rows)


def explain(planned: Planned) -> list[str]:
    """Explain the choice: bounds, fixed settings, the number of timed choices, the gain of more memory."""
    plan, request = planned.plan, planned.request
    lines = [_bounds(plan)] if plan.fits else []
    # clipping fixes when updates run, whether a user has set that or not
    given = request.choice.given.keys() - ({"updates"} if request.clips else set())
    fixed = [key for name, key in KEYS.items() if name in given]
    lines.append(
        f"Fixed by the settings: {', '.join(fixed)}."
        if fixed
        else "No setting of memory was fixed: all were chosen."
    )
    if plan.fits:
        lines.append(
            f"{plan.num_evaluated:,} choices were timed in {plan.plan_s:.2g} s, the most promising first; "
            + (
                "others were left when the search had done as much as it may."
                if plan.is_cut_short
                else "the others do not fit, or have bounds above the best time."
            )
        )
    lines += _needs(request)
    lines += [
        text for name, other in _variants(request, fits=plan.fits) if (text := _compare(plan, name, other))
    ]
    return lines


def head(planned: Planned) -> Iterator[str]:
    """Yield the rows that name the model, the step, the data and the machine."""
    plan, request = planned.plan, planned.request
    anatomy, spec, batch = request.anatomy, request.spec, plan.batch
    masters = request.optimizer.summary
    size = f"{format_count(anatomy.num_params)} parameters, {counted(len(anatomy.layers), 'layer')}"
    yield from row("model", f"{planned.model}: {size}")
    ranks = f"{batch.num_ranks:,} ranks x " if batch.num_ranks > 1 else ""
    shape = f"{ranks}{batch.num_micro_batches} x {batch.micro_batch_size} x {batch.seq_len:,}"
    shape += f" = {batch.step_tokens:,}"
    num_runs = batch.num_runs * batch.num_ranks
    runs = f" in {num_runs:,} runs (parallel.shards)" if num_runs > 1 else ""
    yield from row(
        "step",
        f"{shape} tokens{runs}; {anatomy.precision}, {masters}, "
        f"{'clipped' if request.clips else 'not clipped'}",
    )
    if planned.data:
        yield from row("data", planned.data)
    drives = "no drives" if spec.drives is None else f"{_tera(spec.drives.nbytes)} on drives"
    device = "the host computes" if spec.is_cpu else spec.device
    gpus = f"{spec.num_gpus} x " if spec.num_gpus > 1 else ""
    nodes = f"{spec.num_nodes:,} nodes, each " if spec.num_nodes > 1 else ""
    machine = f"{nodes}{gpus}{device}, {_tera(spec.host_bytes)} of host memory, {drives}"
    yield from row("machine", f"{spec.name}: {machine}")


def _tiers(planned: Planned) -> Iterator[str]:
    plan, request = planned.plan, planned.request
    yield f" {'tier':<8}{'what, in the unit of what it needs':<64}{'need':>12}{'have':>12}"
    for tier, limit in request.limits.items():
        pools = [pool for pool in plan.pools if pool.tier == tier]
        if not pools:
            continue
        need = sum(pool.nbytes for pool in pools)
        verdict = "" if limit is None or need <= limit else "  too much"
        have = "-" if limit is None else binary(limit)
        first, *rest = wrap(_pools(pools, need), 62)
        yield f" {_TIERS[tier]:<8}{first:<64}{binary(need):>12}{have:>12}{verdict}"
        yield from (f" {'':<8}{line}" for line in rest)


def _pools(pools: list[Pool], need: int) -> str:
    """List the pools of a tier, the largest first, in the unit of `binary(need)`; tiny ones are summed up."""
    unit = next((unit for unit in (1 << 30, 1 << 20, 1 << 10) if need >= unit), 1)
    largest = sorted(pools, key=lambda pool: -pool.nbytes)
    shown = [pool for pool in largest if pool.nbytes >= _TINY * need]
    rest = sum(pool.nbytes for pool in largest[len(shown) :])
    words = [f"{pool.name} {number_text(pool.nbytes / unit)}" for pool in shown]
    if rest >= _TINY * need:
        words.append(f"others {number_text(rest / unit)}")
    return ", ".join(words)


def _step(planned: Planned) -> Iterator[str]:
    plan = planned.plan
    bounds = sorted(plan.bounds_s.items(), key=lambda item: -item[1])
    lanes = " | ".join(f"{name} {seconds_text(seconds)}" for name, seconds in bounds)
    yield from row("time", f"{lanes} -> {seconds_text(plan.step_s)}, bound by {plan.bound}")
    again = f" ({plan.hardware_mfu:.1%} with what is computed again)"
    yield from row("speed", f"{number_text(plan.tokens_per_s)} tokens/s, MFU {plan.mfu:.1%}{again}")
    yield from row(
        "eval",
        f"{plan.tokens_together:,} tokens of an evaluation or a reference pass together: "
        f"{seconds_text(plan.pass_s)}, {binary(plan.pass_bytes)} to the device",
    )


def _watch(planned: Planned) -> Iterator[str]:
    found = planned.watching
    if found.rotation is None:
        yield from row("watch", "nothing of the state in RAM (memory.watch=off)")
        return
    each = "all" if found.rotation == 1 else f"{found.share:.2%} of"
    parts = [f"{each} {binary(found.state_bytes)} of state in RAM at any moment"] if found.state_bytes else []
    if found.frozen_bytes:
        often = "step" if found.rotation == 1 else f"{found.rotation:,} steps"
        parts.append(f"all {binary(found.frozen_bytes)} of frozen weights, each once in {often}")
    if found.unwatched_bytes:
        parts.append(f"nothing of {binary(found.unwatched_bytes)} that is updated on the device or on drives")
    yield from row("watch", f"{'; '.join(parts)}; {found.seconds / planned.plan.step_s:.1%} of the step")


def _total(money: Economics) -> Iterator[str]:
    parts = [f"{counted(money.steps, 'step')}, {format_duration(money.days * 86400)}"]
    parts += [] if money.kwh is None else [f"{number_text(money.kwh)} kWh"]
    if money.usd is not None and money.usd_per_hour is not None:
        parts.append(
            f"${number_text(money.usd)} at ${money.usd_per_hour:.2f} per hour ({money.price_source})"
        )
    else:
        parts.append("no price known (--price-per-hour)")
    yield from row("total", f"{money.tokens:,} tokens: {', '.join(parts)}")
    taken = (
        "" if money.checkpoint_s is None else f", {seconds_text(money.checkpoint_s)} to write to the drives"
    )
    yield from row("saving", f"a checkpoint is {binary(money.checkpoint_bytes)}{taken}")
    if money.drive_written:
        days = money.drive_days
        lasts = "endurance not known" if days is None else f"{days:,.0f} days to rated endurance"
        per_day, total = _tera(money.drive_written_per_day), _tera(money.drive_written)
        yield from row("wear", f"{per_day} written to the drives per day, {total} in all; {lasts}")


def _ways(name: str, texts: Sequence[str]) -> Iterator[str]:
    """List the remedies, one per row; each is enough."""
    for number, text in enumerate(texts):
        yield from row("or" if number else name, text)


def _verdict(planned: Planned) -> Iterator[str]:
    plan = planned.plan
    if not plan.fits:
        over = {tier: plan.tier_bytes(tier) - limit for tier, limit in plan.limits.items()}
        short = [f"{binary(over[tier])} too little {MEMORIES[tier]}" for tier in over if over[tier] > 0]
        yield from row("verdict", f"{planned.verdict.text}: {' and '.join(short)}")
        yield from _ways("use", [remedy.text for remedy in planned.remedies])
        if not planned.remedies:
            yield from row("use", "nothing that can be set makes it fit, nor does more memory or a drive")
        return
    spare = [
        f"{binary(limit - plan.tier_bytes(tier))} of {MEMORIES[tier]}"
        for tier, limit in plan.limits.items()
        if tier != "nvme"
    ]
    yield from row("verdict", f"{planned.verdict.text}, with {' and '.join(spare)} to spare")
    if planned.verdict.wear is not None:
        yield from _ways("use", [*planned.spares, "memory.accept_wear=true, to train all the same"])
    for reason in planned.verdict.reasons:
        yield from row("but", reason)


def settings_text(planned: Planned) -> str:
    """Return the choice as overrides of `train`."""
    plan = planned.plan
    words = [
        f"{section}.{name}={str(value).lower() if isinstance(value, bool) else value}"
        for section, values in policy(plan).items()
        for name, value in values.items()
        if value != "auto"  # a choice that differs between layers is made again
    ]
    counts = Counter(plan.choice.activations)
    if len(counts) > 1:
        layers = ", ".join(f"{count} {name}" for name, count in counts.items())
        words.append(f"(layers: {layers})")
    if plan.choice.tiers:
        planes = ", ".join(sorted(plane for plane, tier in plan.choice.tiers if tier == "nvme"))
        words.append(f"(on drives: {planes}, of all but {plan.choice.blocks_in_ram} blocks)")
    if plan.choice.uses_drives and not planned.request.names_drives:
        # with commits it would be another plan, since each writes all of the state
        words += ["memory.tiers='{nvme: [DIRECTORY, ...]}'", "memory.commit_every=null"]
    return " ".join(words)


def _bounds(plan: Plan) -> str:
    bounds = sorted(plan.bounds_s.items(), key=lambda item: -item[1])
    (name, longest), *others = bounds
    rest = ", ".join(f"{other} {seconds_text(seconds)}" for other, seconds in others)
    over = plan.step_s / longest - 1
    beside = f" At the same time: {rest}." if rest else ""
    waiting = f" Operations that wait for each other make it {over:.1%} longer." if over >= 5e-4 else ""
    return (
        f"A step cannot be shorter than {seconds_text(longest)}, which is what {name} takes.{beside}{waiting}"
    )


def _needs(request: Request) -> Iterator[str]:
    """Yield the least host memory with which the model fits, without and with drives, as the remedies do."""
    for drives, where in ((None, "Without drives"), (request.spec.drives, "With state on the drives")):
        if drives is None and where.startswith("With state"):
            continue
        ram = enough_ram(replace(request, spec=replace(request.spec, drives=drives)))
        if ram is not None:
            yield f"{where} {ram.text} of host memory are enough."


def _variants(request: Request, *, fits: bool) -> Iterator[tuple[str, Request]]:
    spec = request.spec
    ram = 2 * spec.host_bytes
    if fits:  # otherwise the least memory that is enough has been said
        yield (
            f"With twice the host memory ({binary(ram)})",
            replace(request, spec=spec.with_ram(ram), host_limit=None),
        )
    if request.clips:
        yield "Without clipping", replace(request, clips=False)
    if spec.drives is None:
        size = enough_drives(request)
        if size is not None:
            yield f"With a drive of {size.text}", replace(request, spec=spec.with_drive_bytes(size.nbytes))


def _compare(plan: Plan, name: str, request: Request) -> str:
    other = make_plan(request)
    if not other.fits:
        return "" if plan.fits else f"{name} it does not fit either."
    speed = f"{number_text(other.tokens_per_s)} tokens/s, bound by {other.bound}"
    if not plan.fits:
        return f"{name} it fits: {speed}."
    gain = other.tokens_per_s / plan.tokens_per_s - 1
    if gain < 0.005:
        return f"{name} it is no faster."
    return f"{name} it is {gain:.1%} faster: {speed}."


def row(name: str, text: str) -> Iterator[str]:
    """Yield the lines of a row of the page, the first with its name."""
    for number, line in enumerate(wrap(text, _WIDTH - 10)):
        yield f" {name if number == 0 else '':<8}{line}"


def seconds_text(seconds: float) -> str:
    """Return seconds, or milliseconds below a tenth of one."""
    return f"{number_text(seconds)} s" if seconds >= 0.1 else f"{number_text(seconds * 1e3)} ms"


def number_text(value: float) -> str:
    """Return a number with three digits, never as a power of ten."""
    if value >= 999.5:
        return f"{value:,.0f}"
    digits = 2 if value <= 0 else max(0, 2 - math.floor(math.log10(value)))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tera(nbytes: float) -> str:
    """Return bytes in TB or GB of 10^9 with binary units beside them; small sizes have binary units only."""
    if nbytes >= 1e12:
        return f"{number_text(nbytes / 1e12)} TB ({number_text(nbytes / (1 << 40))} TiB)"
    if nbytes >= 1e9:
        return f"{number_text(nbytes / 1e9)} GB ({number_text(nbytes / GIB)} GiB)"
    return binary(round(nbytes))
