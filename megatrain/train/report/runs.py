"""Tables of runs: a list, one run in short, and several side by side."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatrain.errors import MegatrainError, OutputError, os_errors
from megatrain.train.records.directory import RunDirectory
from megatrain.train.report.card import plan_and_fact
from megatrain.train.report.collect import RunFiles, read_run
from megatrain.train.report.page import facts_of
from megatrain.train.report.texts import event_text, model_name

_log = logging.getLogger(__name__)

_LEVELS = 2
"""The number of folder levels below a given one in which runs are looked for."""

_EVENTS_SHOWN = 10
_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""The shares of the tokens that all runs have trained on at which their losses are compared."""

_WINDOW = 0.05
"""The share of these tokens over which the loss is averaged, since single steps are noisy."""

_NOT_COMPARED = ("out", "log.", "checkpoint.resume")


def find_runs(places: Sequence[Path]) -> list[RunFiles]:
    """Return the runs that are, or are in, these directories; a damaged one among others is left out.

    Raises:
        OutputError: A place holds no run.
        MegatrainError: A run that was named cannot be read.
    """
    found: dict[Path, RunFiles] = {}
    for place in places:
        with os_errors("read", place):
            here = [path for path in _candidates(place, _LEVELS) if RunDirectory(path).is_run]
        if not here:
            raise OutputError(f"{place} holds no run (a directory with a config.yaml); give one that does")
        for path in here:
            try:
                found[path.resolve()] = read_run(path)
            except MegatrainError as error:
                if path == place or len(here) == 1:
                    raise
                _log.warning("%s is left out: %s", path, error)
    return list(found.values())


def _candidates(place: Path, levels: int) -> Iterator[Path]:
    if not place.is_dir():
        return
    yield place
    if levels and not RunDirectory(place).is_run:
        for child in sorted(place.iterdir()):
            yield from _candidates(child, levels - 1)


def run_row(run: RunFiles) -> dict[str, Any]:
    """Return a run in one row of plain values."""
    evaluations = run.evaluations()
    best = [min(row["loss"] for row in rows) for rows in evaluations.values()]
    return {
        "run": str(run.path),
        "state": run.state(),
        "step": run.step,
        "steps": run.num_steps,
        "loss": run.last_loss,
        "best_eval": best[0] if best else None,
        "tokens_per_s": run.tokens_per_s or None,
        "model": model_name(str(run.config.get("model", {}).get("path", "")))[0],
        "written": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.written_s)) if run.written_s else None,
    }


def list_runs(places: Sequence[Path], *, as_json: bool = False) -> str:
    """Return the runs of some places as a table, the newest last."""
    rows = [run_row(run) for run in sorted(find_runs(places), key=lambda run: run.written_s)]
    if as_json:
        return json.dumps(rows)
    lines = [
        (
            row["run"],
            row["state"],
            f"{row['step']}/{row['steps'] or '?'}",
            _loss(row["loss"]),
            _loss(row["best_eval"]),
            _rate(row["tokens_per_s"]),
            row["model"],
            row["written"] or "-",
        )
        for row in rows
    ]
    head = ("run", "state", "step", "loss", "eval", "tokens/s", "model", "written")
    return table([head, *lines], right=(2, 3, 4, 5))


def show_run(place: Path, *, as_json: bool = False) -> str:
    """Return a run in short: its state, plan and fact, its last events."""
    run = read_run(place)
    state = run.state()
    facts = facts_of(run, state)
    compared = list(plan_and_fact(run))
    events = list(run.events)[-_EVENTS_SHOWN:]
    if as_json:
        values = {"plan_and_fact": compared, "events": events, "config": run.config}
        return json.dumps({**run_row(run), **values})
    parts = [table([("run", str(place)), *map(tuple, facts)])]
    if compared:
        parts.append(table([("", "planned", "seen"), *compared]))
    if events:
        times = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) for row in events)
        parts.append(table([(at, event_text(row)) for at, row in zip(times, events, strict=True)]))
    return "\n\n".join(parts)


def compare_runs(places: Sequence[Path], *, as_json: bool = False) -> str:
    """Return runs side by side: the settings that differ, losses at equal tokens, speed.

    Raises:
        OutputError: There are fewer than two runs.
    """
    runs = find_runs(places)
    if len(runs) < 2:
        raise OutputError(f"{runs[0].path} is one run; give two or more to compare")
    settings = different_settings(runs)
    losses = losses_at_equal_tokens(runs)
    speeds = {
        "tokens/s": [run.tokens_per_s for run in runs],
        "time of a step, s": [run.step_s for run in runs],
        "steps": [float(run.step) for run in runs],
    }
    if as_json:
        names = [str(run.path) for run in runs]
        return json.dumps({"runs": names, "settings": settings, "loss": losses, "speed": speeds})
    head = ("", *(run.name for run in runs))
    parts = [table([head, *((key, *map(_short, values)) for key, values in settings.items())])]
    if not settings:
        parts = ["no setting differs"]
    at = [(f"{tokens:,}", *map(_loss, values)) for tokens, values in losses.items()]
    right = tuple(range(1, len(runs) + 1))
    if at:
        parts.append(table([("loss at tokens", *head[1:]), *at], right=right))
    rows = [(name, *(f"{value:,.4g}" for value in values)) for name, values in speeds.items()]
    parts.append(table([("speed", *head[1:]), *rows], right=right))
    return "\n\n".join(parts)


def different_settings(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return, by key, the values of settings that are not the same in all runs."""
    flat = [dict(_flatten(run.config)) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    found = {key: [values.get(key) for values in flat] for key in keys if not key.startswith(_NOT_COMPARED)}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and not prefix:
            yield from _flatten(value, f"{key}.")
        else:
            yield prefix + key, value


def losses_at_equal_tokens(runs: Sequence[RunFiles]) -> dict[int, list[float | None]]:
    """Return losses after numbers of tokens that all runs have trained on."""
    curves = [
        [
            (row["tokens"], row["loss"])
            for row in run.rows
            if row.get("tokens") and row.get("loss") is not None
        ]
        for run in runs
    ]
    if not all(curves):
        return {}
    most = min(curve[-1][0] for curve in curves)
    places = dict.fromkeys(round(share * most) for share in _SHARES)
    return {place: [_loss_at(curve, place, most) for curve in curves] for place in places}


def _loss_at(curve: Sequence[tuple[int, float]], tokens: int, most: int) -> float | None:
    """Return the mean loss of the steps in the window before a place, or of the last one before it."""
    before = [loss for at, loss in curve if at <= tokens]
    near = [loss for at, loss in curve if tokens - _WINDOW * most < at <= tokens]
    return fmean(near) if near else before[-1] if before else None


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows of text as columns; those of `right` are flush right."""
    lines = [list(map(str, row)) for row in rows]
    width = [max(len(row[column]) for row in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(row, width, strict=True))
        ).rstrip()
        for row in lines
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
