"""What the suite costs: CPU seconds of its folders, of children too, in a table at the end of a whole run.

Seconds of a clock tell how busy a machine was; these tell which folder has grown. They differ by a third
between machines and with what else runs, so the table fails nothing: it is read when `make test` gets slow.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests import forks

BUDGET_S = 850
"""Of a whole run, on a machine that does nothing else: about seven minutes of two cores."""

MANY = 1000
"""Tests from which on a run is of the whole suite."""

_KEY = "cpu_seconds"


def spent_s() -> float:
    """Return the CPU seconds of this process, of its children that have ended, and of scripts in forks."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + forks.SPENT[0]


def area_of(path: str) -> str:
    """Name the folder in `tests` that a test's file is in; its own name where that is none."""
    parts = path.split("/")
    return "/".join(parts[:2])


def table(seconds: Mapping[str, float], counts: Mapping[str, int]) -> list[str]:
    """Lay out what each area has cost, the most expensive first, and what all have."""
    rows = [
        f"{seconds[area]:7.1f} s {counts[area]:6,}  {area}"
        for area in sorted(seconds, key=lambda area: -seconds[area])
        if seconds[area] >= 1
    ]
    total_s = sum(seconds.values())
    verdict = f"of {BUDGET_S:,} s" if total_s <= BUDGET_S else f"MORE than the {BUDGET_S:,} s that there are"
    return [*rows, f"{total_s:7.1f} s {sum(counts.values()):6,}  in all, {verdict}"]


class CpuSeconds:
    """A plugin: each process counts its own, and the first one adds up."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._has_run = False
        """Tests ran in this very process."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Count one test with its fixtures."""
        self._has_run = True
        before_s = spent_s()
        result = yield
        area = area_of(item.nodeid.partition("::")[0])
        self._seconds[area] += spent_s() - before_s  # type: ignore[assignment]
        self._counts[area] += 1
        return result

    def pytest_sessionfinish(self) -> None:
        """Count what no test was: imports and collection; and hand all of it on to the first process."""
        times = os.times()
        own_s = times.user + times.system  # of the first process, whose children have counted themselves
        between_s = spent_s() - sum(self._seconds.values()) if self._has_run else own_s
        self._seconds["between tests"] += between_s  # type: ignore[assignment]
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_KEY] = [dict(self._seconds), dict(self._counts)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a process of xdist has counted; one that has crashed has counted nothing."""
        seconds, counts = getattr(node, "workeroutput", {}).get(_KEY, ({}, {}))
        self._seconds.update(seconds)
        self._counts.update(counts)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the table after a whole run."""
        if sum(self._counts.values()) >= MANY:
            terminalreporter.section("CPU seconds")
            for line in table(self._seconds, self._counts):
                terminalreporter.write_line(line)
