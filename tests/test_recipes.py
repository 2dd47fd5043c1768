"""The plans that `docs/recipes.md` and `docs/planning.md` show are those that the planner makes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config, read_config, set_keys
from megatrain.config.choice import AUTO
from megatrain.hardware import load_machine
from megatrain.plan.search import verdict
from megatrain.plan.search.planner import make_plan
from megatrain.recipes import recipes, shapes
from megatrain.train.planning.plan_report import report
from megatrain.train.planning.plan_run import Planned, plan_run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/recipes.md"
TOLERANCE = 0.02
"""Relative: a plan moves a little with each refinement of the planner; more has to be told."""

RECIPES = {
    match[1]: {"shape": match[2], "machine": match[3], "ram": match[4], "nvme": match[5]}
    for match in re.finditer(
        r"^megatrain plan (\S+) --hf-config (\S+) --machine (\S+) --ram (\S+)"
        r" --nvme (\S+)$",
        re.sub(r"\s*\\\n\s*", " ", PAGE.read_text(encoding="utf-8")),
        re.MULTILINE,
    )
}


SHOWN = re.findall(
    r"^megatrain plan (\S+) --hf-config (\S+) --machine (\S+) --ram (\S+) --nvme (\S+)( --tokens 1B)?\n"
    r"```\n\n```text\n((?:.+\n)+?)```",
    (ROOT / "docs/planning.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
"""Plans of recipes in the other page: what is asked, and lines of what is printed."""


@pytest.fixture(autouse=True)
def searched_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are those of the command, not of a search for a moment, as in other tests."""
    monkeypatch.setattr(verdict, "make_plan", make_plan)


def plan(name: str, *, shape: str, machine: str, ram: str, nvme: str, **settings: str) -> Planned:
    """Plan a recipe as its command does."""
    spec = load_machine(machine).with_ram(int(ram.removesuffix("GiB")) << 30)
    spec = spec.with_drive_bytes(int(float(nvme.removesuffix("TB") or 0) * 1e12))
    file = recipes()[name]
    raw = set_keys(read_config(file), list(settings.items()))
    return plan_run(raw, spec, source=str(file), hf_config=shapes()[shape])


def words_of(text: str) -> list[str | float]:
    """Return words and numbers; days and hours are hours."""
    text = re.sub(r"(\d+)d (\d+)h", lambda match: f"{24 * int(match[1]) + int(match[2])} h", text)
    found = re.findall(r"\d[\d,]*(?:\.\d+)?|[^\s\d]+", text)
    return [float(word.replace(",", "")) if word[0].isdigit() else word for word in found]


def is_alike(left: list[str | float], right: list[str | float]) -> bool:
    """Whether words are the same, and numbers nearly."""
    return all(
        a == (pytest.approx(b, rel=TOLERANCE) if isinstance(b, float) else b)
        for a, b in zip(left, right, strict=True)
    )


def numbers(name: str, planned: Planned) -> dict[str, Any]:
    """Return the numbers of a recipe's plan; its first line says if it is tight, and no drive wears out."""
    file = recipes()[name]
    found = json.loads(report(planned, as_json=True))
    assert found["verdict"]["kind"] in ("fits", "tight"), found["verdict"]
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith("# TIGHT: ") == (found["verdict"]["kind"] == "tight"), first
    gib = {
        tier: sum(pool["nbytes"] for pool in found["pools"] if pool["tier"] == tier) / 2**30
        for tier in ("device", "ram", "nvme")
    }
    return {
        "model": found["model"]["num_params"],
        "tokens": found["batch"]["tokens"],
        "step_s": found["step_s"],
        "tokens_per_s": found["tokens_per_s"],
        "verdict": found["verdict"]["text"],
        **gib,
    }


def row(name: str, found: dict[str, Any]) -> str:
    """Return the row of the table in the page."""
    recipe = RECIPES[name]
    cells = (
        f"`{name}`",
        f"{found['model'] / 1e9:.3g}B",
        f"{recipe['machine']}, {recipe['ram']}",
        f"{found['tokens']:,}",
        f"{found['step_s']:.1f}",
        f"{found['tokens_per_s']:,.0f}",
        f"{found['device']:.1f}",
        f"{found['ram']:,.1f}",
        f"{found['nvme']:,.1f}",
        found["verdict"],
    )
    return f"| {' | '.join(cells)} |"


def shown(name: str) -> list[str]:
    (line,) = re.findall(rf"^\| `{name}` .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_recipe_has_a_plan_and_a_row() -> None:
    assert recipes().keys() - {"dpo", "finetune", "lora", "pretrain", "sft"} == RECIPES.keys()
    for name in RECIPES:
        assert len(shown(name)) == 10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "8b-24gb" else pytest.mark.parity) for name in RECIPES]
)
def test_numbers_are_the_planner_s(name: str) -> None:
    asked = RECIPES[name]
    planned = plan(name, **asked)
    cells = row(name, numbers(name, planned)).strip("|").split("|")
    for left, right in zip(shown(name), (cell.strip() for cell in cells), strict=True):
        if re.fullmatch(r"[\d,.]+", right):
            assert float(left.replace(",", "")) == pytest.approx(
                float(right.replace(",", "")), rel=TOLERANCE, abs=0.11
            )
        else:
            assert left == right
    for recipe, *others, tokens, text in SHOWN:
        if recipe == name:
            other = dict(zip(("shape", "machine", "ram", "nvme"), others, strict=True))
            found = planned if other == asked else plan(name, **other)
            printed = words_of(report(replace(found, tokens=10**9) if tokens else found))
            for line in text.splitlines():
                words = words_of(line)
                starts = range(len(printed) - len(words) + 1)
                assert any(is_alike(words, printed[start : start + len(words)]) for start in starts), line


def test_the_8b_s_step_is_the_one_that_is_proposed_where_the_usual_one_does_not_fit() -> None:
    usual = {"train.tokens_per_step": "auto"}
    found = plan("8b-24gb", **RECIPES["8b-24gb"], **usual)
    assert not found.plan.fits
    wanted = load_config("8b-24gb").train.tokens_per_step
    assert found.remedies[0].text == f"train.tokens_per_step={wanted}"


def test_planning_shows_a_plan_that_fits_and_one_that_does_not() -> None:
    verdicts = [re.findall(r"verdict (FITS|DOES NOT FIT)", text) for *_, text in SHOWN]
    assert verdicts == [["FITS"], ["DOES NOT FIT"]]


def test_recipes_clip_and_are_exact() -> None:
    for name in RECIPES:
        config = load_config(name)
        assert (config.optim.max_grad_norm, config.optim.state, config.train.precision) == (1.0, "fp32", AUTO)


@pytest.mark.parity
def test_what_the_page_says_of_other_memory_for_120b_is_planned() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "With 1.65 TB (1,536 GiB) it fits, clipped," in text
    recipe = RECIPES["120b-h200"]
    spec = load_machine(recipe["machine"])
    file = recipes()["120b-h200"]
    found, speeds = {}, {}
    for ram, nvme in ((1.5, 0.0), (1.5, 4.0), (1.65, 0.0), (2.0, 0.0)):
        machine = spec.with_ram(int(ram * 1e12)).with_drive_bytes(int(nvme * 1e12))
        planned = plan_run(read_config(file), machine, source=str(file), hf_config=shapes()[recipe["shape"]])
        found[ram, nvme] = planned.verdict.kind.value
        speeds[ram, nvme] = planned.plan.tokens_per_s
    assert found == {
        (1.5, 0.0): "does_not_fit",
        (1.5, 4.0): "tight",
        (1.65, 0.0): "tight",
        (2.0, 0.0): "fits",
    }
    assert speeds[1.5, 4.0] == pytest.approx(speeds[1.65, 0.0], rel=0.02)
