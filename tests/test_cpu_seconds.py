"""The table of what the suite costs adds up, over processes too."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cpu_seconds import BUDGET_S, MANY, CpuSeconds, area_of, spent_s, table
from tests.forks import run_script


def test_areas_are_the_folders_of_tests() -> None:
    assert area_of("tests/stream/forward/test_lockstep.py") == "tests/stream"
    assert area_of("tests/test_cli.py") == "tests/test_cli.py"


@pytest.mark.parametrize(("more_s", "verdict"), [(0, f"of {BUDGET_S} s"), (1, "MORE than the")])
def test_the_table_adds_up_and_says_what_is_too_much(more_s: float, verdict: str) -> None:
    rows = table({"a": 2.0, "small": 0.5, "b": BUDGET_S - 2.5 + more_s}, {"a": 3, "small": 1, "b": 1200})
    assert [row.split()[-1] for row in rows[:-1]] == ["b", "a"], "the most expensive first, none below 1 s"
    assert rows[-1].split("  in all, ")[0].split() == [f"{BUDGET_S + more_s:.1f}", "s", "1,204"]
    assert verdict in rows[-1]


def test_processes_are_added_up_and_what_is_between_tests_is_counted() -> None:
    def plugin(**more: Any) -> Any:
        return CpuSeconds(SimpleNamespace(**more))  # type: ignore[arg-type]

    output: dict[str, Any] = {}
    worker = plugin(workeroutput=output)
    for name in ("one", "two"):
        run = worker.pytest_runtest_protocol(SimpleNamespace(nodeid=f"tests/store/test_{name}.py::test_it"))
        next(run)
        until_s = time.process_time() + 0.03
        while time.process_time() < until_s:
            pass
        with pytest.raises(StopIteration):
            run.send(None)
    worker.pytest_sessionfinish()
    seconds, counts = output["cpu_seconds"]
    assert counts == {"tests/store": 2}
    assert seconds["tests/store"] >= 0.04, "the clock's ticks are of 10 ms"
    assert sum(seconds.values()) == pytest.approx(spent_s(), abs=1.0)
    first = plugin()
    shown: list[str] = []
    for node in (SimpleNamespace(workeroutput=output), SimpleNamespace()):
        first.pytest_testnodedown(node)
    reporter = SimpleNamespace(section=shown.append, write_line=shown.append)
    first.pytest_terminal_summary(reporter)
    assert shown == [], "two tests are no whole run"
    first.pytest_testnodedown(SimpleNamespace(workeroutput={"cpu_seconds": [{}, {"tests/store": MANY}]}))
    first.pytest_terminal_summary(reporter)
    assert shown[0] == "CPU seconds"
    assert "in all" in shown[-1]


def test_what_a_script_in_a_fork_spends_is_counted_when_it_has_ended() -> None:
    """Its parent ends after the last test, so that waiting for that one tells too late."""
    run_script("pass")  # with the imports of that interpreter
    before_s = spent_s()
    run_script("import time\nwhile time.process_time() < 0.3: pass")
    assert spent_s() - before_s >= 0.2
