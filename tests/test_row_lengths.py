"""The table of row lengths in `docs/planning.md` is the one that its command makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan.row_lengths import LENGTHS, MACHINES, MODELS, Cell, Row, cell, row, table, with_table
from megatrain.hardware import load_machine

ROOT = Path(__file__).parents[1]
SAVED = json.loads((ROOT / "benchmarks/results/plan-row-lengths.json").read_text())["rows"]
PAGE = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
TOLERANCE = 0.02
"""Relative, as of the other tables of the page."""


def saved_rows() -> list[Row]:
    return [Row(**one | {"cells": tuple(Cell(**each) for each in one["cells"])}) for one in SAVED]


def is_alike(found: Cell, before: Cell) -> bool:
    return (found.fits, found.tier) == (before.fits, before.tier) and (
        found.tokens_per_s,
        found.need_bytes,
    ) == pytest.approx((before.tokens_per_s, before.need_bytes), rel=TOLERANCE)


def test_the_page_has_the_table_of_the_saved_figures() -> None:
    found = saved_rows()
    assert [(one.model, one.machine, one.drives) for one in found] == [
        (model, machine, drives) for model in MODELS for machine in MACHINES for drives in (True, False)
    ]
    assert all(tuple(each.seq_len for each in one.cells) == LENGTHS for one in found)
    assert "\n".join(table(found)) in PAGE


def test_a_table_takes_the_place_of_the_one_with_its_heads() -> None:
    page = "text\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nmore | text\n"
    expected = "text\n\n| a | b |\n|---|---|\n| 5 | 6 |\n\nmore | text\n"
    assert with_table(page, ["| a | b |", "|---|---|", "| 5 | 6 |"]) == expected
    with pytest.raises(ValueError, match="one table with these heads"):
        with_table(page, ["| a | c |"])
    with pytest.raises(ValueError, match="one table with these heads"):
        with_table(page + page, ["| a | b |"])


def test_no_plan_is_above_the_ceiling_and_each_is_near_it() -> None:
    """Rows of 131,072 tokens and more are attention and products: copies and updates hide behind them."""
    cells = [each for one in saved_rows() for each in one.cells if each.fits]
    assert len(cells) >= 8
    for each in cells:
        assert each.tokens_per_s is not None
        assert each.ceiling is not None
        assert 0.7 < each.tokens_per_s / each.ceiling < 1


def test_what_is_longer_fits_no_sooner_and_is_no_faster() -> None:
    for one in saved_rows():
        fits = [each.fits for each in one.cells]
        assert fits == sorted(fits, reverse=True)
        speeds = [each.tokens_per_s for each in one.cells if each.tokens_per_s is not None]
        assert speeds == sorted(speeds, reverse=True)


def test_a_row_of_131072_tokens_is_planned_as_saved() -> None:
    (before,) = [
        one for one in saved_rows() if (one.model, one.machine, one.drives) == ("llama-8b", "h100", False)
    ]
    found = cell("llama-8b", replace(load_machine("h100"), drives=None), LENGTHS[0])
    assert is_alike(found, before.cells[0])
    assert found.working_bytes == pytest.approx(before.cells[0].working_bytes, rel=0.01)


@pytest.mark.parity
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_row_is_planned_as_saved(model: str, machine: str) -> None:
    for before in saved_rows():
        if (before.model, before.machine) == (model, machine):
            found = row(model, machine, drives=before.drives)
            assert all(is_alike(*both) for both in zip(found.cells, before.cells, strict=True))
