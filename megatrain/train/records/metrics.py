"""What a run records and shows: one row per step, in `metrics.jsonl` and on the screen.

The file holds each step once, whatever the number of interruptions: a resumed run cuts the rows beyond its
checkpoint, and a last line that a crash tore. A damaged row is kept aside and named; the others stay.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from megatrain import files
from megatrain.errors import os_errors
from megatrain.train.records.json_lines import JsonLines

logger = logging.getLogger(__name__)

_GIB = 2**30
MUCH_PADDING = 0.05
"""Of a step's tokens: with more of it speeds are said without padding too, as steps are logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One step, as a row of `metrics.jsonl`."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the step's real tokens, before the update."""
    grad_norm: float | None
    """Global norm before clipping. None = not computed."""
    lr: float
    tokens: int
    """Tokens read since the run began, without padding."""
    tokens_per_s: float
    seconds: float
    """Duration of the step."""
    targets: int = 0
    """Those of them that were trained on: with a label."""
    skipped: bool = False
    """The gradient was not finite, or the loss jumped, and nothing was updated."""
    shown: Mapping[str, float] = field(default_factory=dict)
    """What else the loss has to say, each under its own name in a row, such as `rewards/margins`."""
    spike_above: float | None = None
    """The loss jumped: the highest that were no jump. In a row only then."""
    host_bytes: int = 0
    device_bytes: int = 0
    """Peak of the run so far."""
    mfu: float | None = None
    """Model FLOPs per second, as a share of the matrix products that the device was measured to do: those of
    all ranks' tokens, padding left out, by all ranks' devices."""
    bound: str | None = None
    """What bounds the step: copies, compute, the optimizer, or the drives."""
    over_bound: float | None = None
    """The step's time over that of its bound; 1 if all the rest overlaps."""
    fetch_bytes: int = 0
    """Copied to the device in the step: weights, and gradients that go on adding up."""
    offload_bytes: int = 0
    """Gradients copied to the host in the step."""
    gathered_bytes: int | None = None
    """Of weights, got from the other ranks of the node. In rows of several ranks only, as the next ones; all
    bytes and times of a step are the first rank's."""
    exchanged_bytes: int | None = None
    """Of sums of gradients, sent to other ranks."""
    spread_bytes: int | None = None
    """Of new weights, sent to other nodes."""
    swapped_bytes: int | None = None
    """Inside attention, given to the ranks that share out the same rows."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the longest waits: which lane waited, for which, with what buffer."""
    lane_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which each lane worked; lanes work at the same time."""
    power_w: float | None = None
    """Of the device, at the end of the step. This and what follows is in a row only where it is known."""
    temperature_c: float | None = None
    throttled: tuple[str, ...] | None = None
    """Why the device runs slower than it could; empty: it does not."""
    energy_j_per_token: float | None = None
    """Of the device, over the step and what came since the one before, per real token of the step."""
    ecc_errors: int | None = None
    """New memory errors of the device, corrected ones included."""
    swap_bytes: int | None = None
    """That the machine swapped in and out."""
    drive_written_bytes: int | None = None
    """That all ranks of the run have written to drives so far, before a resume too."""

    @property
    def logged(self) -> dict[str, float]:
        """Numbers for callbacks, by the names that transformers gives them."""
        numbers = {"loss": self.loss, "learning_rate": self.lr, "tokens_per_s": self.tokens_per_s}
        if self.grad_norm is not None:
            numbers["grad_norm"] = self.grad_norm
        return numbers | dict(self.shown)


AMONG_RANKS = ("gathered_bytes", "exchanged_bytes", "spread_bytes", "swapped_bytes")
"""Fields that only rows of several ranks have."""

_ONLY_WHERE_KNOWN = {
    "spike_above",
    *AMONG_RANKS,
    "power_w",
    "temperature_c",
    "throttled",
    "energy_j_per_token",
    "ecc_errors",
    "swap_bytes",
    "drive_written_bytes",
}
"""Fields that are left out of a row on a machine that does not tell them."""

_IN_EVERY_ROW = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "seconds"}
"""Fields without which a line is no row, in any version."""

_ROW_STARTS = re.compile(rb'(?<=.)(?=\{"step": )', re.DOTALL)
"""Where a row begins within a line: the newline before it is damaged."""

_NUMBERS_SHOWN = 10


class MetricsLog(JsonLines):
    """Appends rows to a JSONL file."""

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int = 0) -> None:
        """Open the file, and cut what lies beyond the step that the run continues from.

        Rows before it that are damaged go to `metrics.damaged.jsonl`, with their numbers.

        Args:
            path: of the file; made if missing, refused if it is a link.
            resume_step: the last step to keep; 0 begins a new file.

        Raises:
            OutputError: the file cannot be written.
        """
        super().__init__(Path(path), partial(_cut_after, last_step=resume_step))

    def write(self, row: StepMetrics) -> None:
        """Append one row.

        Raises:
            OutputError: as `append`.
        """
        self.append(
            {
                name: value
                for name, value in asdict(row).items()
                if name != "shown" and (value is not None or name not in _ONLY_WHERE_KNOWN)
            }
            | dict(row.shown)
        )


def _cut_after(descriptor: int, path: Path, last_step: int) -> bool:
    """Leave the sound rows until a step; those that are damaged are kept aside and named.

    A last line without its end is what a crash tore, and no damage. Returns False where rows had to be taken
    out of the middle, and `path` is a new file.
    """
    with os_errors("read", path), os.fdopen(os.dup(descriptor), "rb") as file:
        lines = [row for line in file if line.endswith(b"\n") for row in _ROW_STARTS.split(line)]
    steps = [_step_of(line) for line in lines]
    sound = _rising(steps)
    kept = sorted(number for number in sound if steps[number] <= last_step)
    end = kept[-1] + 1 if kept else 0
    if kept and steps[kept[-1]] == last_step:
        last = end
    else:  # a damaged row after the last sound one may be of a step that is not taken again
        last = min((number for number in sound if steps[number] > last_step), default=len(lines))
    damaged = [number for number in range(last if last_step else 0) if number not in sound]
    if damaged:
        aside = path.with_name(f"{path.stem}.damaged{path.suffix}")
        _keep_aside(aside, {number + 1: lines[number] for number in damaged})
        rows = ", ".join(str(number + 1) for number in damaged[:_NUMBERS_SHOWN])
        more = f" and {len(damaged) - _NUMBERS_SHOWN} more" if len(damaged) > _NUMBERS_SHOWN else ""
        logger.warning("%s: damaged in row %s%s, now kept in %s", path, rows, more, aside)
    content = b"".join(lines[number] for number in kept)
    if len(kept) < end:
        files.write_bytes_durably(path, content)
        return False
    with os_errors("write", path):
        files.system.truncate(descriptor, len(content))
    return True


def _step_of(line: bytes) -> int:
    """Return the step of a row; -1: it is none, or its end is damaged."""
    if not line.endswith(b"\n"):
        return -1
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return -1
    if not isinstance(row, dict) or not row.keys() >= _IN_EVERY_ROW:
        return -1
    step = row["step"]
    return step if type(step) is int and step > 0 else -1


def _rising(steps: Sequence[int]) -> set[int]:
    """Return the places of the longest rising sequence of steps: a row whose step is out of it is damaged."""
    ends: list[int] = []  # by length, the least step that such a sequence ends with, and where
    places: list[int] = []
    before: dict[int, int] = {}
    for place, step in enumerate(steps):
        if step < 0:
            continue
        length = bisect_left(ends, step)
        if length:
            before[place] = places[length - 1]
        ends[length : length + 1] = [step]
        places[length : length + 1] = [place]
    found = set()
    place = places[-1] if places else -1
    while place >= 0:
        found.add(place)
        place = before.get(place, -1)
    return found


def _keep_aside(aside: Path, rows: Mapping[int, bytes]) -> None:
    """Append damaged rows, each with its number, once."""
    with os_errors("read", aside):
        there = files.read_bytes(aside) if aside.exists() else b""
    entries = [json.dumps({"row": number, "text": line.decode("latin-1")}) for number, line in rows.items()]
    known = set(there.decode("latin-1").splitlines())
    added = "".join(f"{entry}\n" for entry in entries if entry not in known)
    files.write_bytes_durably(aside, there + added.encode())


def format_bytes(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB where that would read 0."""
    if num_bytes < _GIB:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / _GIB:.2f} GiB"


def format_count(number: int) -> str:
    """Return a number of parameters or tokens with three digits: `7.62 B`, `135 M`, `260 K`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            value = number / size
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return str(number)


def format_duration(seconds: float | None) -> str:
    """Return a duration with its two largest units, such as `4d 09h`, `2h 05m` or `0m 07s`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02d}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {whole % 60:02d}s"
