"""The metrics of a run: one row per step, in `metrics.jsonl` and on the screen.

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
"""The share of padding in a step's tokens above which logs show speeds without padding too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One step, as a row of `metrics.jsonl`."""

    step: int
    """The number of steps done, this one included."""
    loss: float
    """The mean over the step's real tokens, before the update."""
    grad_norm: float | None
    """The global norm before clipping; None if it was not computed."""
    lr: float
    tokens: int
    """The number of tokens read since the run began, without padding."""
    tokens_per_s: float
    seconds: float
    """The duration of the step."""
    targets: int = 0
    """The number of these tokens that were trained on, which have a label."""
    skipped: bool = False
    """Whether nothing was updated, since the gradient was not finite or the loss jumped."""
    shown: Mapping[str, float] = field(default_factory=dict)
    """The other values of the loss, each under its own name in a row, such as `rewards/margins`."""
    spike_above: float | None = None
    """The highest loss that would have been no jump; it is in a row only after a jump."""
    replay: str | None = None
    """The verdict of a step that was run again because of a jump: `data` or `unknown`."""
    host_bytes: int = 0
    device_bytes: int = 0
    """The peak of device memory of the run so far."""
    mfu: float | None = None
    """The model FLOPs per second, as a share of the device's measured rate of matrix products: those of all
    ranks' tokens, without padding, by all ranks' devices."""
    bound: str | None = None
    """The bound of the step: copies, compute, the optimizer, or the drives."""
    over_bound: float | None = None
    """The step's time over that of its bound; 1 if all the rest overlaps."""
    fetch_bytes: int = 0
    """The bytes copied to the device in the step: weights, and gradients that are still accumulated."""
    offload_bytes: int = 0
    """The bytes of gradients copied to the host in the step."""
    allocator_retries: int = 0
    """How often torch gave device memory back in the step, to find some, and waited for the device."""
    unused_device_bytes: int = 0
    """The bytes of device memory that torch keeps and nobody uses, at the step's end."""
    gathered_bytes: int | None = None
    """The bytes of weights received from other ranks of the node. This and the next fields are only in rows
    of several ranks; all bytes and times of a step are the first rank's."""
    exchanged_bytes: int | None = None
    """The bytes of sums of gradients that were sent to other ranks."""
    spread_bytes: int | None = None
    """The bytes of new weights that were sent to other nodes."""
    swapped_bytes: int | None = None
    """The bytes that were given inside attention to the ranks with parts of the same rows."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """The seconds of the longest waits, by the waiting lane, the awaited one, and the buffer."""
    lane_seconds: Mapping[str, float] = field(default_factory=dict)
    """The seconds for which each lane worked; lanes work at the same time."""
    power_w: float | None = None
    """The power of the device at the end of the step. This and the next fields are written where known."""
    temperature_c: float | None = None
    throttled: tuple[str, ...] | None = None
    """The reasons why the device runs slower than it could; empty if it does not."""
    energy_j_per_token: float | None = None
    """The device's energy over the step and the time since the one before, per real token of the step."""
    ecc_errors: int | None = None
    """The number of new memory errors of the device, corrected ones included."""
    experts: Mapping[str, Mapping[str, float]] | None = None
    """How evenly the step's tokens went to experts, by router (`3.mlp.gate` is that of the fourth layer): the
    share of the `busiest` expert and of the `least` busy one, and the number of `unused` ones, over all
    ranks."""
    swap_bytes: int | None = None
    """The bytes that the machine swapped in and out."""
    drive_written_bytes: int | None = None
    """The bytes that all ranks of the run have written to drives so far, before a resume too."""

    @property
    def logged(self) -> dict[str, float]:
        """Return the numbers for callbacks, by their names in transformers."""
        numbers = {"loss": self.loss, "learning_rate": self.lr, "tokens_per_s": self.tokens_per_s}
        if self.grad_norm is not None:
            numbers["grad_norm"] = self.grad_norm
        return numbers | dict(self.shown)


AMONG_RANKS = ("gathered_bytes", "exchanged_bytes", "spread_bytes", "swapped_bytes")
"""The fields that only rows of several ranks have."""

_ONLY_WHERE_KNOWN = {
    "spike_above",
    "replay",
    *AMONG_RANKS,
    "power_w",
    "temperature_c",
    "throttled",
    "energy_j_per_token",
    "ecc_errors",
    "experts",
    "swap_bytes",
    "drive_written_bytes",
}
"""The fields that a row lacks on a machine that does not tell them."""

_IN_EVERY_ROW = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "seconds"}
"""The fields without which a line is no row, in any version."""

_ROW_STARTS = re.compile(rb'(?<=.)(?=\{"step": )', re.DOTALL)
"""The place where a row begins within a line, since the newline before it is damaged."""

_NUMBERS_SHOWN = 10


class MetricsLog(JsonLines):
    """Appends rows to a JSONL file."""

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int = 0) -> None:
        """Open the file, and cut rows beyond the step from which the run resumes.

        Earlier rows that are damaged go to `metrics.damaged.jsonl`, with their numbers.

        Args:
            path: The path of the file, which is made if missing, and refused if it is a link.
            resume_step: The last step to keep; 0 begins a new file.

        Raises:
            OutputError: The file cannot be written.
        """
        super().__init__(Path(path), partial(_cut_after, last_step=resume_step))

    def write(self, row: StepMetrics) -> None:
        """Append one row."""
        self.append(
            {
                name: value
                for name, value in asdict(row).items()
                if name != "shown" and (value is not None or name not in _ONLY_WHERE_KNOWN)
            }
            | dict(row.shown)
        )


def _cut_after(descriptor: int, path: Path, last_step: int) -> bool:
    """Keep the sound rows up to a step; damaged ones are kept aside and named.

    A last line without its end was torn by a crash, and is no damage. The result is False where rows had to
    be taken out of the middle, so that `path` is a new file.
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
    """Return the step of a row; -1 if it is no row, or its end is damaged."""
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
    """Return the places of the longest rising sequence of steps; rows outside of it are damaged."""
    ends: list[int] = []  # for each length, the least last step of such a sequence, and its place
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
