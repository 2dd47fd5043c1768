"""Each row of the fault table in docs/reliability.md has a test that exists, or says why there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/reliability.md"
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
REASON = re.compile(r"not yet: \w[^|;]{3,}")
HEAD = ["#", "fault", "what happens", "tests"]


@cache
def functions(file: Path) -> frozenset[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def rows() -> list[list[str]]:
    """Return the cells of every row of the page's tables of faults."""
    found: list[list[str]] = []
    is_inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = (
            [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        )
        if cells == HEAD:
            is_inside = True
        elif not cells:
            is_inside = False
        elif is_inside and not line.startswith("|--"):
            found.append(cells)
    return found


def faults_of(row: list[str]) -> list[str]:
    """Return what is wrong with a row."""
    if len(row) != len(HEAD):
        return [f"row {row[0]} has {len(row)} cells"]
    tests, reason = TEST.findall(row[3]), REASON.search(row[3])
    wrong = [
        f"row {row[0]}: there is no {file}::{name}"
        for file, name in tests
        if not (TESTS / file).is_file() or name not in functions(TESTS / file) or not name.startswith("test_")
    ]
    if not tests and not reason:
        wrong.append(f"row {row[0]} has neither a test nor a reason")
    left = re.sub(r"[\s,;]", "", REASON.sub("", TEST.sub("", row[3])))
    return wrong + ([f"row {row[0]}: {left!r} is neither a test nor a reason"] if left else [])


def test_every_row_has_a_test_that_exists_or_a_reason() -> None:
    table = rows()
    assert [fault for row in table for fault in faults_of(row)] == []
    assert [row[0] for row in table] == [str(number) for number in range(1, len(table) + 1)]
    assert len(table) >= 60


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("", "has neither a test nor a reason"),
        ("`test_reliability.py::test_nothing`", "there is no"),
        ("`test_nothing.py::test_every_row_has_a_test_that_exists_or_a_reason`", "there is no"),
        ("`test_reliability.py::rows`", "there is no"),
        ("`test_reliability.py::test_a_row_without_a_test_is_found`, later", "'later' is neither"),
        ("not yet: ", "has neither a test nor a reason"),
    ],
)
def test_a_row_without_a_test_is_found(tests: str, said: str) -> None:
    assert said in "; ".join(faults_of(["7", "a fault", "what happens", tests]))


def test_a_row_with_both_is_fine() -> None:
    tests = "`test_reliability.py::test_a_row_with_both_is_fine`; not yet: the other half"
    assert faults_of(["7", "a fault", "what happens", tests]) == []
