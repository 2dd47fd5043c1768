"""A run directory as plain values, for its report, its page, its tables and its model card.

Only files are read, and none is needed but `config.yaml`: a run may go on, or have ended in any way.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatrain.config.yaml12 import parse_yaml
from megatrain.errors import OutputError, os_errors
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.json_lines import read_rows
from megatrain.train.records.metrics import AMONG_RANKS
from megatrain.train.records.shareable import shareable, without_home

_ENDS = {"end": "done", "stop": "stopped", "error": "failed"}
_BEGINS = ("start", "resume")
_SILENT_S = 120.0
"""The seconds of silence (and ten steps at least) after which a run is no longer said to be running."""

_YEAR_9999_S = 2.5e11
_LARGEST = 1e300

_AT_END = 10
"""The number of rows over which the last loss is averaged."""


@dataclass(frozen=True)
class RunFiles:
    """The contents of the files of a run."""

    path: Path
    config: Mapping[str, Any]
    """The settings by section, as `shareable` shows them."""
    environment: Mapping[str, Any]
    plan: Mapping[str, Any]
    """The plan; empty if there is none."""
    rows: Sequence[Mapping[str, Any]]
    """The rows of `metrics.jsonl`, by step."""
    events: Sequence[Mapping[str, Any]]
    """The rows of `events.jsonl`, by time."""
    written_s: float
    """The time of the run's last write, in seconds since 1970."""
    has_model: bool
    is_in_use: bool
    """Whether a process holds its lock, or whether that cannot be told."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.path.resolve().name

    @cached_property
    def num_steps(self) -> int | None:
        """The number of steps of the whole run; None if unknown."""
        told = [row.get("steps") for row in self.events if row.get("event") in _BEGINS]
        steps = told[-1] if told else self.config.get("train", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def step(self) -> int:
        """The number of steps that have a row."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def state(self, now_s: float | None = None) -> str:
        """Return `done`, `stopped`, `failed`, `running`, `killed`, or `silent` if it may hang."""
        ends = [row["event"] for row in self.events if row["event"] in (*_ENDS, *_BEGINS)]
        if ends and ends[-1] in _ENDS:
            return _ENDS[ends[-1]]
        if not ends and self.has_model:
            return "done"
        if not self.is_in_use:
            return "killed"
        silent_s = (time.time() if now_s is None else now_s) - self.written_s
        return "running" if silent_s < max(_SILENT_S, 10 * self.step_s) else "silent"

    @cached_property
    def step_s(self) -> float:
        """The median seconds of a step, 0 without one. The first step allocates, and counts only if alone."""
        times = self.numbers("seconds")
        return median(times[1:] or times) if times else 0.0

    @cached_property
    def tokens_per_s(self) -> float:
        """The tokens of the steps over their time, without the first; 0 if there is none."""
        rows = self.rows[1:] or self.rows
        pairs = [(row.get("tokens_per_s"), row.get("seconds")) for row in rows]
        seconds = sum(s for rate, s in pairs if rate and s)
        return sum(rate * s for rate, s in pairs if rate and s) / seconds if seconds else 0.0

    @property
    def last_loss(self) -> float | None:
        """The mean of the last rows' losses."""
        losses = self.numbers("loss")[-_AT_END:]
        return fmean(losses) if losses else None

    def numbers(self, name: str) -> list[float]:
        """Return the known values of a column."""
        return [row[name] for row in self.rows if isinstance(row.get(name), (int, float))]

    def evaluations(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the evaluations by the name of their data, each step's last one."""
        found: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row in self.events:
            if row["event"] == "evaluation" and is_number(row.get("loss")):
                found.setdefault(str(row.get("name") or "eval"), {})[row["step"]] = row
        return {name: [rows[step] for step in sorted(rows)] for name, rows in found.items()}

    def most(self, name: str) -> int:
        """Return the largest value of a column of bytes."""
        return int(max(self.numbers(name), default=0))


def read_run(path: Path) -> RunFiles:
    """Read a run directory.

    Raises:
        OutputError: The path is no run directory.
    """
    directory = RunDirectory(path)
    with os_errors("read", path):
        if not directory.is_run:
            raise OutputError(
                f"{path} is not a run directory (one with a config.yaml); give the directory that train wrote"
            )
        config = parse_yaml(_text(directory.config), source=str(directory.config))
        sections = config.items() if isinstance(config, dict) else ()
        written = [file.stat().st_mtime for file in (directory.metrics, directory.events) if file.exists()]
        return RunFiles(
            path=path,
            config=shareable(
                {name: values for name, values in sections if isinstance(values, dict) or name == "out"}
            ),
            environment=_environment(directory.environment),
            plan=without_home(_plan(directory.plan)),
            rows=_by_step(_known(row) for row in read_rows(directory.metrics) if _is_whole(row)),
            events=[
                without_home(row)
                for row in read_rows(directory.events)
                if _is_whole(row) and isinstance(row.get("event"), str) and _is_time(row.get("time"))
            ],
            written_s=max(written, default=0.0),
            has_model=directory.model.is_dir(),
            is_in_use=directory.is_in_use,
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OutputError(f"{path} is not UTF-8 text; it is no file of a run, or damaged") from error


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float holds."""
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and -_LARGEST < value < _LARGEST  # neither nan, nor an int that no float holds


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value < _YEAR_9999_S


def _is_whole(row: Mapping[str, Any]) -> bool:
    return type(row.get("step")) is int


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics without the values of types that a run does not write."""
    checks = dict.fromkeys(_NUMBERS, is_number) | dict.fromkeys(("waits", "lane_seconds"), _are_numbers)
    checks["bound"] = lambda value: isinstance(value, str)
    return {name: value for name, value in row.items() if name not in checks or checks[name](value)}


def _by_step(rows: Any) -> list[Mapping[str, Any]]:
    found = {row["step"]: row for row in rows}
    return [found[step] for step in sorted(found)]


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _plan(path: Path) -> dict[str, Any]:
    """Read a plan; one in a form that no run writes counts as none."""
    plan = _json(path)
    pools, limits, model = plan.get("pools", []), plan.get("limits", {}), plan.get("model", {})
    is_sound = (
        isinstance(pools, list)
        and all(is_number(plan.get(name, 0.0)) for name in ("step_s", "tokens_per_s", "host_plane_bytes"))
        and all(isinstance(pool, dict) and is_number(pool.get("nbytes")) for pool in pools)
        and all(isinstance(pool.get(name), str) for pool in pools for name in ("name", "tier"))
        and isinstance(limits, dict)
        and all(value is None or is_number(value) for value in limits.values())
        and isinstance(model, dict)
        and is_number(model.get("num_params", 0))
    )
    return plan if is_sound else {}


def _environment(path: Path) -> dict[str, Any]:
    """Return the facts about the machine, without the command line that older versions have kept."""
    known = {name: value for name, value in _json(path).items() if name != "arguments"}
    return without_home(known)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes(), parse_constant=lambda _: None)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


MOST_POINTS = 1000
"""The largest number of points of a curve; a longer one is averaged."""

_COLUMNS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "seconds",
    "mfu",
    "host_bytes",
    "device_bytes",
    "power_w",
)
_NUMBERS = (*_COLUMNS, *AMONG_RANKS, "tokens", "targets")
_MOST_WAITS = 6


def columns(run: RunFiles, most: int = MOST_POINTS) -> dict[str, Any]:
    """Return the curves of a run by name, among them `step` and `tokens`; unknown values are None."""
    rows = run.rows
    size = max(1, math.ceil(len(rows) / most))
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    found: dict[str, Any] = {name: [group[-1].get(name) for group in groups] for name in ("step", "tokens")}
    for name in _COLUMNS:
        found[name] = [_mean(row.get(name) for row in group) for group in groups]
    for name, keep in (("lane_seconds", None), ("waits", _MOST_WAITS)):
        total: Counter[str] = Counter()
        for row in rows:
            total.update(row.get(name) or {})
        found[name] = {
            key: [_mean((row.get(name) or {}).get(key, 0.0) for row in group) for group in groups]
            for key, _ in total.most_common(keep)
        }
    bounds = Counter(row["bound"] for row in rows if row.get("bound"))
    found["bound"] = dict(bounds.most_common())
    found["averaged"] = size
    return found


def _mean(values: Any) -> float | None:
    known = [value for value in values if isinstance(value, (int, float))]
    return float(f"{fmean(known):.6g}") if known else None
