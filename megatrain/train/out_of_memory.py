"""The error of a run that runs out of planned memory: the request, the plan, and the use."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.config import Config
from megatrain.config.plan import Plan
from megatrain.config.sizes import binary
from megatrain.errors import CapacityError, exhausted_memory, first_line
from megatrain.hardware import host_memory, resident_bytes
from megatrain.hardware.accelerators import free_bytes, peak_bytes
from megatrain.stream.lanes.devices import compute_device
from megatrain.train.planning.plan_run import Planned


@contextmanager
def memory_told(config: Config, planned: Planned | None, when: str) -> Iterator[None]:
    """Turn a failing allocation inside into one sentence with the plan beside it.

    Args:
        config: The settings of the run.
        planned: The plan in force; None if nothing was planned.
        when: The name of the work that is done inside.

    Raises:
        CapacityError: An allocation failed with an error of Python, numpy, torch or the system.
    """
    try:
        yield
    except Exception as error:
        told = memory_error(error, config, planned, when)
        if told is None:
            raise
        raise told from error


def memory_error(
    error: BaseException, config: Config, planned: Planned | None, when: str
) -> CapacityError | None:
    """Return the sentence of `memory_told` for a failed allocation; None for any other error."""
    tier = exhausted_memory(error)
    if tier is None:
        return None
    facts = [] if planned is None else [_planned(planned.plan, tier)]
    device = compute_device(config.train.device)
    if tier == "host":
        limit = host_memory()
        facts.append(f"this process holds {binary(resident_bytes())}")
        facts.append(f"{binary(limit.available_bytes)} are left ({limit.source})")
    elif device.type != "cpu":
        facts.append(f"the run has held {binary(peak_bytes(device))} at most")
        facts.append(f"{binary(free_bytes(device))} of the device are free")
    return CapacityError(
        f"{tier} memory ran out {when}: {', '.join(facts)} ({first_line(error)}). Close what else takes "
        f"memory, or have less planned, with memory.{tier}_limit"
    )


def _planned(plan: Plan, tier: str) -> str:
    name = {"host": "ram"}.get(tier, tier)
    limit = plan.limits.get(name)
    of = "" if limit is None else f" of {binary(limit)} that it may take"
    return f"the plan takes {binary(plan.tier_bytes(name))}{of}"


def let_go(error: BaseException) -> None:
    """Drop what the frames hold in which an error was raised: the activations of the step, above all."""
    pending, seen = [error], set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        pending += [other for other in (each.__cause__, each.__context__) if other is not None]
    gc.collect()
