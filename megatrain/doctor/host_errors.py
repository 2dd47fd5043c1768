"""The errors of host memory that the kernel has counted (EDAC), below `/sys/devices/system/edac`.

Source: https://docs.kernel.org/admin-guide/RAS/main.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatrain.doctor.checks import ROOT, Check, failed, passed, warning
from megatrain.hardware.system_files import number_of, text_of

_NAME = "host memory errors"
_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryErrors:
    """What the controllers of a machine have counted since their counters began."""

    num_controllers: int
    corrected: int
    uncorrected: int
    days: float | None
    """The days since the counters began; None: not told."""
    worst: str
    """The label of the module with most errors; empty: there is none, or none has a label."""


def memory_errors(root: Path = ROOT) -> MemoryErrors | None:
    """Read the counters of all controllers; None: the kernel has none, so errors are not counted."""
    controllers = sorted((root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))
    controllers = [each for each in controllers if number_of(each / "ce_count") is not None]
    if not controllers:
        return None
    corrected, uncorrected = (
        sum(number_of(each / name) or 0 for each in controllers) for name in ("ce_count", "ue_count")
    )
    since = [number_of(each / "seconds_since_reset") for each in controllers]
    known = [seconds for seconds in since if seconds is not None]
    modules = [module for each in controllers for module in sorted(each.glob("dimm[0-9]*"))]
    counted = [
        ((number_of(module / "dimm_ue_count") or 0, number_of(module / "dimm_ce_count") or 0), module)
        for module in modules
    ]
    most, worst = max(counted, default=((0, 0), root), key=lambda pair: pair[0])
    return MemoryErrors(
        num_controllers=len(controllers),
        corrected=corrected,
        uncorrected=uncorrected,
        days=max(known) / _DAY_S if known else None,
        worst=text_of(worst / "dimm_label") if any(most) else "",
    )


def check_memory_errors(root: Path = ROOT) -> Check:
    """Say whether host memory corrects errors, and how many there were."""
    found = memory_errors(root)
    if found is None:
        return passed(
            _NAME,
            "the kernel counts none (no ECC, no EDAC driver for it, or a virtual machine); a run watches its "
            "own state (memory.watch)",
        )
    controllers = "1 controller" if found.num_controllers == 1 else f"{found.num_controllers} controllers"
    days = "" if found.days is None else f" in {found.days:,.1f} days"
    where = f", most in {found.worst}" if found.worst else ""
    text = f"ECC on {controllers}: {found.corrected:,} corrected, {found.uncorrected:,} not{days}{where}"
    if found.uncorrected:
        return failed(_NAME, text, "do not train on this memory: replace the module, or take it out")
    if found.corrected:
        return warning(
            _NAME,
            text,
            "look at them again in a day: a module that goes on to make errors makes one that cannot be "
            "corrected sooner or later; rasdaemon keeps count of them",
        )
    return passed(_NAME, text)
