"""The lines that a user reads before the first step, made from the plan before memory is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from megatrain.config import Config
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.plan import Plan
from megatrain.config.sizes import counted
from megatrain.train.planning.plan_run import Planned
from megatrain.train.planning.stop_time import stop_time
from megatrain.train.records.metrics import MUCH_PADDING, format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from megatrain.train.run_data import RunData

_PRECISIONS = {"fp32": "fp32", "bf16": "bf16 with fp32 masters"}


def start_lines(
    config: Config,
    planned: Planned | None,
    data: RunData,
    *,
    first_step: int,
    now: datetime,
    ranks: str = "",
    evaluated: Sequence[int] = (),
) -> Iterator[str]:
    """Yield the lines: model and data, steps, memory, the expected speed, and the place of the results.

    Args:
        config: The settings, in which nothing is open.
        planned: The plan; None if the model cannot be counted, which makes two of the lines one.
        data: The training data. If the loss has a reference, it is computed for their rows, like for those
            of the evaluation, before the first step, unless it is kept.
        first_step: The number of steps that an earlier process has done.
        now: The local time, from which the end is foreseen.
        ranks: The ranks that train together, in a few words; empty for a single one.
        evaluated: The number of rows of each evaluation set.
    """
    num_steps = data.num_steps
    size = "" if planned is None else f" ({format_count(planned.request.anatomy.num_params)} parameters)"
    start = "from random weights, " if config.model.init == "random" else ""
    numbers = [_PRECISIONS[config.train.precision]]
    if config.optim.name != DEFAULT.name:
        numbers.append(f"by {config.optim.name}")
    if config.optim.state != DEFAULT.state:
        numbers.append(f"optimizer state: {config.optimizer.describe()}")
    yield f"training: {config.model.path}{size}, {start}in {', '.join(numbers)}, on {data.packed.describe()}"
    if ranks:
        yield f"ranks: {ranks}"
    yield f"step: {_step(config, num_steps)}"
    if planned is None:
        yield "memory and speed: not known before the first step, since this model cannot be counted"
    else:
        yield f"memory: {_memory(planned)}: {planned.verdict.sentence}"
        judged = len(data.rows) if config.objective.has_reference else 0
        passes = "".join(_passes(planned, evaluated, judged))
        yield f"speed: {_speed(planned.plan, data.packed.padding, num_steps, first_step, now)}{passes}"
        if planned.hint:
            yield f"faster: {planned.hint}"
    going_on = f"; going on from step {first_step} of {num_steps}" if first_step else ""
    stops = "" if planned is None else _stop(planned, evaluated)
    yield f"results: in {config.out}, the model in {config.out}/hf at the end{stops}{going_on}"


def _step(config: Config, num_steps: int) -> str:
    """Describe the size of a step, as a product, and the number of steps."""
    train = config.train
    each = config.objective.rows.one
    rows = train.micro_batch_size
    size = f"{rows:,}" if each is None else f"{counted(rows, each)} of 2"
    number = counted(train.grad_accumulation, "micro-batch")
    return (
        f"{counted(train.tokens_per_step, 'token')} in {number} of {size} x {config.data.seq_len:,}; "
        f"{counted(num_steps, 'step')} in all"
    )


def _memory(planned: Planned) -> str:
    plan, spec = planned.plan, planned.request.spec
    parts = [_share(plan, "ram", "in RAM")]
    if not spec.is_cpu:
        parts.append(_share(plan, "device", f"on {spec.name}"))
    on_drives = plan.tier_bytes("nvme")
    if on_drives:
        parts.append(f"{format_bytes(on_drives)} on drives")
    return ", ".join(parts)


def _share(plan: Plan, tier: str, place: str) -> str:
    limit = plan.limits.get(tier)
    of = "" if limit is None else f" of {format_bytes(limit)}"
    return f"{format_bytes(plan.tier_bytes(tier))}{of} {place}"


def _speed(plan: Plan, padding: float, num_steps: int, first_step: int, now: datetime) -> str:
    left = num_steps - first_step
    left_s = plan.step_s * left
    end = now + timedelta(seconds=left_s)
    when = f"{end:%H:%M}" if end.date() == now.date() else f"{end:%Y-%m-%d %H:%M}"
    step_s = f"{plan.step_s:.3g} s" if plan.step_s >= 0.1 else f"{plan.step_s * 1e3:.3g} ms"
    limit = "" if plan.bound == _NO_OVERLAP else f" (what takes longest: {plan.bound})"
    take = "takes" if left == 1 else "take"
    lasts = _lasting(left_s) + ("" if left_s < 1 else f", until {when}")
    steps = f"{counted(left, 'step')} {take} {lasts}" if left > 0 else "no step is left"
    rate = f"about {plan.tokens_per_s:,.0f} tokens/s"
    if padding > MUCH_PADDING:
        rate += f" ({plan.tokens_per_s * (1 - padding):,.0f} without padding)"
    return f"{rate}, {step_s} a step{limit}; {steps}"


def _passes(planned: Planned, evaluated: Sequence[int], judged: int) -> Iterator[str]:
    """Yield the time of passes without gradients, beside the steps."""
    if evaluated:
        yield f"; an evaluation takes {_lasting(_evaluation_s(planned, evaluated))}"
    if judged:
        seconds = _pass_s(planned, [judged, *evaluated])
        yield f"; the reference, before the first step, {_lasting(seconds)}"


def _evaluation_s(planned: Planned, evaluated: Sequence[int]) -> float:
    return _pass_s(planned, evaluated, planned.config.eval.batches)


def _pass_s(planned: Planned, rows: Sequence[int], most: int | None = None) -> float:
    size = planned.config.train.micro_batch_size
    counts = [-(-count // size) for count in rows]
    return planned.evaluation_s(sum(min(count, most or count) for count in counts))


def _stop(planned: Planned, evaluated: Sequence[int]) -> str:
    """Say how long a stop takes, for whoever sets a scheduler's warning."""
    evaluation_s = _evaluation_s(planned, evaluated) if evaluated else 0.0
    stop = stop_time(planned.config, planned.request, planned.plan, evaluation_s=evaluation_s)
    return f"; a stop (Ctrl-C, SIGTERM, SIGUSR1) saves and ends within about {stop.most}"


def _lasting(seconds: float) -> str:
    return "less than a second" if seconds < 1 else format_duration(seconds)


_NO_OVERLAP = "everything in turn"
"""The bound of a plan for a machine without a device, where nothing overlaps."""
