"""The judgement of a plan: does it fit with room to spare, and do its drives live to the end?

A plan is tight when with 10 % less host or device memory it would not fit, or be more than 10 % slower: a
machine rarely has the very last tenth. It wears out a drive when the run writes more than what is left of the
drive's rated endurance. Where that is not known, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any

from megatrain.config.plan import Plan
from megatrain.config.sizes import binary
from megatrain.errors import CapacityError, WearError
from megatrain.plan.cost.economics import economics
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request, overflow

LESS = 0.1
"""Part of a memory without which a plan is made again."""

SLOWER = 0.1
"""Part of its speed that a plan may lose by that."""

_MEMORIES = {"ram": "host memory", "device": "device memory"}


class Kind(Enum):
    """The kind of a verdict: the gravest of what holds."""

    FITS = "fits"
    TIGHT = "tight"
    WEARS_OUT = "wears_out"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class WithLess:
    """The plan for a machine with less of one memory, which is no more what its owner was promised."""

    tier: str
    """`ram` or `device`."""
    machine_bytes: int
    """Bytes that such a machine has of this memory."""
    plan: Plan
    """The plan on such a machine, which does not fit or is slower."""
    slower: float
    """Part of the speed that is lost."""

    @property
    def text(self) -> str:
        """Say what is lost."""
        where = f"with {LESS:.0%} less {_MEMORIES[self.tier]} ({binary(self.machine_bytes)})".replace(
            "%", " %"
        )
        if not self.plan.fits:
            return f"{where} it does not fit"
        lost = f"{self.slower * 100:.0f} % slower"
        return f"{where} it runs at {self.plan.tokens_per_s:,.0f} tokens/s, {lost}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wear:
    """Drives whose rated endurance the run uses up."""

    day: float
    """The day of the run, counted from now, on which no endurance is left; 0: it is used up already."""
    num_days: float
    """The number of days that the run takes from now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judgement of a plan."""

    fits: bool
    with_less: tuple[WithLess, ...] = ()
    """The smaller machines for which it is tight; empty: there are none."""
    wear: Wear | None = None
    """None: the drives last, or have nothing to write, or their endurance is not known."""
    is_endurance_unknown: bool = False
    """The run writes to drives of which nobody has said how much they bear."""
    is_on_device_alone: bool = False
    """The state of resident blocks is on the device and nowhere else."""

    @property
    def kind(self) -> Kind:
        """Return the gravest of what holds."""
        if not self.fits:
            return Kind.DOES_NOT_FIT
        if self.wear is not None:
            return Kind.WEARS_OUT
        return Kind.TIGHT if self.with_less else Kind.FITS

    @property
    def exit_code(self) -> int:
        """Return what a command ends with that has nothing else to say."""
        codes = {Kind.DOES_NOT_FIT: CapacityError.exit_code, Kind.WEARS_OUT: WearError.exit_code}
        return codes.get(self.kind, 0)

    @property
    def text(self) -> str:
        """Return the verdict in a few words."""
        if not self.fits:
            return "DOES NOT FIT"
        words = ["FITS"]
        if self.with_less:
            words.append("TIGHT")
        if self.wear is not None:
            words.append(
                f"WEARS OUT the drive on day {in_days(self.wear.day)} of {in_days(self.wear.num_days)}"
            )
        return ", ".join(words)

    @property
    def reasons(self) -> list[str]:
        """Say what makes it tight, what is not known and what may be lost: a few words each."""
        found = [less.text for less in self.with_less]
        if self.is_endurance_unknown:
            found.append("how long the drives last is not known (hardware.rated_bytes_written: their TBW)")
        if self.is_on_device_alone:
            found.append(
                "resident layers are on the device alone, so a device that is lost costs what is since the "
                "last checkpoint"
            )
        return found

    @property
    def sentence(self) -> str:
        """Return the verdict with its reasons."""
        return "; ".join([self.text, *self.reasons])

    def json(self) -> dict[str, Any]:
        """Return it as plain values."""
        wear = self.wear
        return {
            "kind": self.kind.value,
            "text": self.text,
            "exit_code": self.exit_code,
            "with_less": [
                {
                    "tier": less.tier,
                    "machine_bytes": less.machine_bytes,
                    "fits": less.plan.fits,
                    "problem": less.plan.problem or None,
                    "step_s": less.plan.step_s if less.plan.fits else None,
                    "tokens_per_s": less.plan.tokens_per_s if less.plan.fits else None,
                    "needs": {tier: less.plan.tier_bytes(tier) for tier in less.plan.limits},
                    "limits": dict(less.plan.limits),
                }
                for less in self.with_less
            ],
            "wear": None if wear is None else {"day": wear.day, "num_days": wear.num_days},
            "endurance_known": not self.is_endurance_unknown,
            "on_device_alone": self.is_on_device_alone,
        }


def judge(
    request: Request,
    plan: Plan,
    *,
    tokens: int,
    written_bytes: int = 0,
    others: Callable[[], Iterable[Request]] = tuple,
    progress: Callable[[str], object] = lambda doing: None,
) -> Verdict:
    """Return the verdict on a plan.

    Args:
        request: The request for which the plan was made.
        plan: The plan.
        tokens: The number of tokens that the run still trains on.
        written_bytes: The bytes that the run has written to its drives so far.
        others: A function that returns the requests in place of `request` where the device has less memory:
            the same step in smaller micro-batches, as long as their size is open.
        progress: A function that is told what takes time, before it begins.
    """
    if not plan.fits:
        return Verdict(fits=False)
    drives = request.spec.drives
    is_unknown = bool(plan.bytes_per_step["drive_written"]) and (
        drives is None or drives.rated_bytes_written is None
    )
    return Verdict(
        fits=True,
        with_less=tuple(_with_less(request, plan, others, progress)),
        wear=wear_of(request, plan, tokens=tokens, written_bytes=written_bytes),
        is_endurance_unknown=is_unknown,
        is_on_device_alone=plan.choice.has_state_on_device,
    )


def _with_less(
    request: Request,
    plan: Plan,
    others: Callable[[], Iterable[Request]],
    progress: Callable[[str], object],
) -> Iterator[WithLess]:
    """Yield the plans for machines with less memory that do not fit, or are slower."""
    spec, enough_s = request.spec, plan.step_s / (1 - SLOWER)
    smaller = {"ram": spec.with_ram(int((1 - LESS) * spec.host_bytes))}
    if spec.device_bytes is not None and not spec.is_cpu:
        smaller["device"] = replace(spec, device_bytes=int((1 - LESS) * spec.device_bytes))
    for tier, machine in smaller.items():
        if not overflow(replace(request, spec=machine), plan.choice):
            continue  # it runs there as it is
        progress(f"planning with 10 % less {_MEMORIES[tier]}")
        best: Plan | None = None
        for asked in chain([request], others() if tier == "device" else ()):
            found = make_plan(replace(asked, spec=machine, start=plan.choice), enough_s=enough_s)
            if best is None or (found.fits and (not best.fits or found.step_s < best.step_s)):
                best = found
            if best.fits and best.step_s <= enough_s:
                break
        else:
            nbytes = machine.host_bytes if tier == "ram" else machine.device_bytes
            assert best is not None
            assert nbytes is not None
            slower = 1 - plan.step_s / best.step_s
            yield WithLess(tier=tier, machine_bytes=nbytes, plan=best, slower=slower)


def wear_of(request: Request, plan: Plan, *, tokens: int, written_bytes: int = 0) -> Wear | None:
    """Return when a run has used up its drives; None: it does not, or that is not known.

    Args:
        request: The request for which the plan was made.
        plan: The plan of a step.
        tokens: The number of tokens that the run still trains on.
        written_bytes: The bytes that the run has written to its drives so far.
    """
    money = economics(plan, request.spec, request.anatomy, tokens=tokens)
    if money.drive_days is None or not tokens:
        return None
    left = max(0.0, money.drive_days - written_bytes / money.drive_written_per_day)
    return Wear(day=left, num_days=money.days) if left < money.days else None


def in_days(days: float) -> str:
    """Return days as a person says them."""
    return f"{days:,.0f}" if days >= 10 else f"{days:.2g}"
