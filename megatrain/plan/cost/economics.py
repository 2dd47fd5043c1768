"""The cost of a token budget on a planned machine: days, money, energy, checkpoints, wear of drives.

Arithmetic on a plan; every unit is SI, money is US dollars. What is not known of the machine is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.plan import Plan
from megatrain.hardware import HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.cost.saved_bytes import checkpoint_bytes

AMORTISED_YEARS = 3
"""Over which the price of a machine is spread, without interest, resale or idle time."""

DAY_S = 86_400.0
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Economics:
    """The days, money, energy and drives that so many tokens take."""

    tokens: int
    """The tokens that were asked for; the last step may train on more."""
    steps: int
    days: float
    usd_per_hour: float | None
    price_source: str
    """The source of the price, in words; empty if there is no price."""
    usd: float | None
    usd_per_million_tokens: float | None
    kwh: float | None
    checkpoint_bytes: int
    checkpoint_s: float | None
    """Seconds in which the machine's drives take a checkpoint; None: it has no drives."""
    drive_written_per_day: float
    """Bytes that a node writes of state and activations; checkpoints are apart."""
    drive_written: float
    """Bytes that all steps write so."""
    drive_days: float | None
    """Days of such training until the drives' rated endurance is used up; None: not known, or no wear."""


def economics(
    plan: Plan,
    spec: HardwareSpec,
    anatomy: Anatomy,
    *,
    tokens: int,
    optimizer: Optimizer = DEFAULT,
    price_per_hour_usd: float | None = None,
) -> Economics:
    """Work out what a token budget takes.

    Args:
        plan: The plan of a step.
        spec: The machine that the plan is for.
        anatomy: The model.
        tokens: The number of tokens to train on.
        optimizer: The optimizer of the run.
        price_per_hour_usd: The price of an hour of the whole machine; None: its rent, or else its price over
            three years.
    """
    steps = math.ceil(tokens / plan.batch.step_tokens)
    seconds = steps * plan.step_s
    price, source = hourly_price(spec, price_per_hour_usd)
    usd = None if price is None else price * seconds / _HOUR_S
    watts = machine_watts(spec)
    written = plan.drive_written_bytes
    per_day = written * DAY_S / plan.step_s
    rated = None if spec.drives is None else spec.drives.rated_bytes_written
    drives = spec.drives
    saved = checkpoint_bytes(anatomy, optimizer)
    return Economics(
        tokens=tokens,
        steps=steps,
        days=seconds / DAY_S,
        usd_per_hour=price,
        price_source=source,
        usd=usd,
        usd_per_million_tokens=None if usd is None else usd / (steps * plan.batch.step_tokens) * 1e6,
        kwh=None if watts is None else watts * seconds / _HOUR_S / 1000,
        checkpoint_bytes=saved,
        checkpoint_s=None if drives is None else saved / drives.write_bytes_per_s,
        drive_written_per_day=per_day,
        drive_written=float(written) * steps,
        drive_days=rated / per_day if rated is not None and per_day else None,
    )


def hourly_price(spec: HardwareSpec, given_usd: float | None) -> tuple[float | None, str]:
    """Return the dollars that an hour of the machine costs, and where the figure is from."""
    nodes = "" if spec.num_nodes == 1 else f", of each of {spec.num_nodes:,} nodes"
    if given_usd is not None:
        return given_usd, "as given"
    if spec.price_per_hour_usd is not None:
        return spec.num_nodes * spec.price_per_hour_usd, f"rent that the machine file names{nodes}"
    if spec.price_usd is not None:
        hours = AMORTISED_YEARS * 365 * 24
        return (
            spec.num_nodes * spec.price_usd / hours,
            f"the machine's price of ${spec.price_usd:,.0f} over {AMORTISED_YEARS} years{nodes}",
        )
    return None, ""


def machine_watts(spec: HardwareSpec) -> float | None:
    """Return the watts that all of the machine draws under load; None: its devices' share is not known."""
    if spec.is_cpu:
        return spec.host_watts
    if spec.device_watts is None:
        return None
    return spec.num_nodes * (spec.num_gpus * spec.device_watts + (spec.host_watts or 0.0))
