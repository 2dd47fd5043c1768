"""The table of families is what was found, and what was found holds."""

from __future__ import annotations

import json

import pytest
import transformers

from benchmarks.models.check import check
from benchmarks.models.families import FAMILIES, Family
from benchmarks.models.page import PAGE, RESULTS, saved_page

FOUND = {row["model_type"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["families"]}
SAMPLE = ("gemma4", "kimi_k25")
"""One whose layers differ, and one of experts, with names that depend on each other; both have towers."""


def test_the_page_is_what_was_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == saved_page(), "renew it: make models"
    assert [(row["name"], row["model_type"], row["kind"]) for row in FOUND.values()] == [
        (family.name, family.model_type, family.kind) for family in FAMILIES
    ]


def test_each_class_of_the_page_exists() -> None:
    for row in FOUND.values():
        assert hasattr(transformers, row["model_class"])
        assert row["num_quantised"] > 0 or row["failed"]


@pytest.mark.filterwarnings("ignore")  # of transformers, on its own defaults
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            each, marks=[] if each.model_type in SAMPLE else [pytest.mark.parity], id=each.model_type
        )
        for each in FAMILIES
    ],
)
def test_a_family_is_as_the_page_says(family: Family) -> None:
    assert check(family).json() == FOUND[family.model_type]
