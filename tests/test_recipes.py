"""The plans that `docs/recipes.md` shows are those that the planner makes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config, read_config
from megatrain.hardware import load_machine
from megatrain.recipes import recipes, shapes
from megatrain.train.planning.plan_report import report
from megatrain.train.planning.plan_run import plan_run

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


def numbers(name: str) -> dict[str, Any]:
    """Plan a recipe as its command does."""
    recipe = RECIPES[name]
    spec = load_machine(recipe["machine"]).with_ram(int(recipe["ram"].removesuffix("GiB")) << 30)
    spec = spec.with_drive_bytes(int(float(recipe["nvme"].removesuffix("TB") or 0) * 1e12))
    file = recipes()[name]
    planned = plan_run(read_config(file), spec, source=str(file), hf_config=shapes()[recipe["shape"]])
    found = json.loads(report(planned, as_json=True))
    assert found["fits"], found["problem"]
    gib = {
        tier: sum(pool["nbytes"] for pool in found["pools"] if pool["tier"] == tier) / 2**30
        for tier in ("device", "ram", "nvme")
    }
    return {
        "model": found["model"]["num_params"],
        "tokens": found["batch"]["tokens"],
        "step_s": found["step_s"],
        "tokens_per_s": found["tokens_per_s"],
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
    )
    return f"| {' | '.join(cells)} |"


def shown(name: str) -> list[str]:
    (line,) = re.findall(rf"^\| `{name}` .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_recipe_has_a_plan_and_a_row() -> None:
    assert recipes().keys() - {"dpo", "finetune", "lora", "pretrain", "sft"} == RECIPES.keys()
    for name in RECIPES:
        assert len(shown(name)) == 9


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "8b-24gb" else pytest.mark.parity) for name in RECIPES]
)
def test_numbers_are_the_planner_s(name: str) -> None:
    planned = row(name, numbers(name)).strip("|").split("|")
    for left, right in zip(shown(name), (cell.strip() for cell in planned), strict=True):
        if re.fullmatch(r"[\d,.]+", right):
            assert float(left.replace(",", "")) == pytest.approx(
                float(right.replace(",", "")), rel=TOLERANCE, abs=0.11
            )
        else:
            assert left == right


def test_recipes_clip_and_are_exact() -> None:
    for name in RECIPES:
        config = load_config(name)
        assert (config.optim.max_grad_norm, config.optim.state, config.train.precision) == (
            1.0,
            "fp32",
            "bf16",
        )
