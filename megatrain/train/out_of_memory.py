"""What a run says when memory that was planned for is not there: what was asked for, planned, and taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatrain.config import Config
from megatrain.config.plan import Plan
from megatrain.errors import CapacityError, exhausted_memory, first_line
from megatrain.hardware import host_memory, resident_bytes
from megatrain.hardware.accelerators import free_bytes, peak_bytes
from megatrain.plan.search.sizes import binary
from megatrain.stream.lanes.devices import compute_device


@contextmanager
def memory_told(config: Config, plan: Plan | None, when: Callable[[], str]) -> Iterator[None]:
    """Turn an allocation inside that fails into one sentence with the plan beside it.

    Args:
        config: Of the run.
        plan: In force; None: there is none.
        when: Says what is done when it fails.

    Raises:
        CapacityError: In place of the error of Python, numpy, torch or the system.
    """
    try:
        yield
    except Exception as error:
        told = memory_error(error, config, plan, when())
        if told is None:
            raise
        raise told from error


def memory_error(error: BaseException, config: Config, plan: Plan | None, when: str) -> CapacityError | None:
    """Return the sentence for an allocation that has failed; None: the error is another."""
    tier = exhausted_memory(error)
    if tier is None:
        return None
    facts = [] if plan is None else [_planned(plan, tier)]
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
