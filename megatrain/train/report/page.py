"""The page of a run: one file that holds data, style, script and plotly, and needs no network.

`page.js` draws what `page_data` returns, in the file as on the page that follows a live run.
"""

from __future__ import annotations

import json
import logging
import math
import time
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError
from megatrain.files import write_bytes_durably
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.metrics import format_bytes, format_duration
from megatrain.train.report.card import plan_and_fact
from megatrain.train.report.collect import RunFiles, columns, read_run
from megatrain.train.report.ranks import ranks_of
from megatrain.train.report.texts import event_text, losses_by_position
from megatrain.train.report.trace_spans import trace_spans

_log = logging.getLogger(__name__)

_HERE = Path(__file__).parent

_MOST_EVENTS = 500
"""The largest number of listed events; the newest are listed."""

_TIERS = {"device": "device memory", "ram": "host memory", "nvme": "drives"}


def is_plotly_there() -> bool:
    """Return whether the extra `report` is installed."""
    return find_spec("plotly") is not None


@cache
def plotly_file() -> Path:
    """Return the file of plotly.js of the installed package; the package itself is not imported.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = find_spec("plotly")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(place) / "package_data" / "plotly.min.js"
        if file.is_file():
            return file
    raise ConfigError("the report needs plotly; install it with: pip install plotly")


def write_report(path: Path, out: Path) -> None:
    """Write the report of a run directory to a file, for this user only.

    Raises:
        ConfigError: plotly is not installed.
        OutputError: The path is no run directory, or the file cannot be written.
    """
    write_bytes_durably(out, report_page(read_run(path)).encode())


def leave_report(directory: RunDirectory) -> None:
    """Write the report; a failure is only logged, since a run is as good without it."""
    if not is_plotly_there():
        _log.info("no report.html: plotly is not installed (pip install plotly)")
        return
    try:
        write_report(directory.path, directory.report)
        _log.info("report: %s", directory.report)
    except Exception as error:
        _log.warning("%s was not written (%s); the run does not need it", directory.report, error)


def report_page(run: RunFiles) -> str:
    """Return the page with everything in it."""
    plotly = plotly_file().read_text(encoding="utf-8").replace("</script", "<\\/script")
    data = json.dumps(page_data(run), allow_nan=False).replace("<", "\\u003c")  # no text may end the script
    return _page(run.name, f"<script>{plotly}</script>\n<script>const DATA = {data};</script>")


def live_page(run: RunFiles) -> str:
    """Return the page that polls `data.json` for news."""
    return _page(run.name, '<script src="plotly.js"></script>\n<script>const DATA = null;</script>')


def _page(name: str, scripts: str) -> str:
    style, script = ((_HERE / file).read_text(encoding="utf-8") for file in ("page.css", "page.js"))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(name)} - megatrain</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main id="page"></main>
{scripts}
<script>
{script}</script>
</body>
</html>
"""


def page_data(run: RunFiles) -> dict[str, Any]:
    """Return all that the page shows, as plain values without numbers that JSON has no form for."""
    curves = columns(run)
    state = run.state()
    seen = trace_spans(run.path / "trace.json")
    page = {
        "name": run.name,
        "state": state,
        "facts": facts_of(run, state),
        "columns": curves,
        "skipped": [row["step"] for row in run.rows if row.get("skipped")],
        "evaluations": {
            name: [[row["step"], row["loss"]] for row in rows] for name, rows in run.evaluations().items()
        },
        "plan": {key: run.plan.get(key) for key in ("step_s", "tokens_per_s", "bound", "bounds_s")}
        if run.plan
        else None,
        "memory": _memory(run),
        "ranks": _ranks(run),
        "comparison": [list(row) for row in plan_and_fact(run)],
        "timeline": seen or run.plan.get("timeline") or [],
        "timeline_source": "measured (trace.json)" if seen else "planned",
        "events": [
            [row["time"], row["step"], row["event"], event_text(row)] for row in run.events[-_MOST_EVENTS:]
        ],
        "settings": [
            [f"{section}.{key}", _plain(value)]
            for section, values in run.config.items()
            for key, value in (values.items() if isinstance(values, dict) else [("", values)])
        ],
        "environment": [[key, _plain(value)] for key, value in run.environment.items()],
    }
    return {key: _finite(value) for key, value in page.items()}


def _finite(value: Any) -> Any:
    """Return plain values with None for what is not finite, which a stranger's file may have anywhere."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def facts_of(run: RunFiles, state: str) -> list[list[str]]:
    """Return the few facts to know first."""
    steps = run.num_steps
    of = f" of {steps:,}" if steps else ""
    facts = [["state", state], ["steps", f"{run.step:,}{of}"]]
    if run.last_loss is not None:
        facts.append(["loss, last steps", f"{run.last_loss:.4f}"])
    for name, rows in run.evaluations().items():
        best = min(rows, key=lambda row: row["loss"])
        facts.append([f"best {name}", f"{best['loss']:.4f} at step {best['step']:,}"])
        if at := losses_by_position(rows[-1]):
            facts.append([f"{name} by position", at])
    if run.rows:
        facts.append(["tokens", f"{run.rows[-1].get('tokens') or 0:,}"])
        facts.append(["tokens/s", f"{run.tokens_per_s:,.0f}"])
        facts.append(["time of a step", f"{run.step_s:.4g} s"])
    ranks = ranks_of(run)
    facts += [] if ranks is None else ranks.facts
    if state == "running" and steps and run.step:
        facts.append(["time left", format_duration((steps - run.step) * run.step_s)])
    if state in ("killed", "silent"):
        facts.append(["last sign of life", time.strftime("%Y-%m-%d %H:%M", time.localtime(run.written_s))])
    saved = [row["step"] for row in run.events if row["event"] == "checkpoint"]
    if saved:
        facts.append(["newest checkpoint", f"step {saved[-1]:,}"])
    return facts


def _ranks(run: RunFiles) -> dict[str, Any] | None:
    """Return how long each rank waited, and the bytes that ranks exchanged; None for a single rank."""
    ranks = ranks_of(run)
    if ranks is None:
        return None
    return {
        "waited_s": list(ranks.waited_s),
        "bytes": [[name, format_bytes(nbytes)] for name, nbytes in ranks.nbytes],
        "lost": [[row["time"], event_text(row)] for row in ranks.lost],
    }


def _memory(run: RunFiles) -> list[dict[str, Any]]:
    """Return the planned pools by tier, with the limit and the measured peak."""
    found = []
    for tier, title in _TIERS.items():
        pools = [pool for pool in run.plan.get("pools", ()) if pool["tier"] == tier and pool["nbytes"]]
        if not pools:
            continue
        pools.sort(key=lambda pool: -pool["nbytes"])
        total = sum(pool["nbytes"] for pool in pools)
        seen = {"device": run.most("device_bytes"), "ram": 0, "nvme": 0}[tier]
        limit = (run.plan.get("limits") or {}).get(tier)
        words = [f"{format_bytes(total)} planned"]
        words += [f"{format_bytes(seen)} seen at the peak"] if seen else []
        words += [f"{format_bytes(limit)} there"] if limit else []
        found.append(
            {
                "title": title,
                "text": ", ".join(words),
                "pools": [[pool["name"], pool["nbytes"], format_bytes(pool["nbytes"])] for pool in pools],
            }
        )
    return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
