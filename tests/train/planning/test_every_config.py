"""Every real configuration plans on every bundled machine, in seconds and without an exception."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatrain.hardware import load_machine, machine_names
from megatrain.train.planning.plan_run import Planned, plan_run

SHARED = Path(__file__).parents[4] / "shared/data"
CONFIGS = sorted((SHARED / "configs").glob("*/config.json")) if SHARED.is_dir() else []
NEEDED = pytest.mark.skipif(not CONFIGS, reason="no configurations in ../shared/data")
PAIRS = [
    ("gpt2", "cpu-laptop"),
    ("Llama-3.1-8B", "rtx-4090"),
    ("Llama-3.1-405B", "h200"),
    ("gpt-oss-120b", "b200"),
    ("Qwen2.5-VL-7B", "gh200"),
]
"""Dense, of experts, with images, too large; a CPU, a desktop, servers."""


def planned(file: Path, machine: str) -> Planned:
    raw = {"model": {"path": str(file)}}
    return plan_run(raw, load_machine(machine), source="test", hf_config=file, is_complete=False)


def check(found: Planned) -> None:
    plan = found.plan
    assert plan.fits != bool(plan.problem)
    assert plan.step_s > 0
    assert 0 < plan.mfu < 1
    if plan.fits:
        for tier, limit in plan.limits.items():
            assert plan.tier_bytes(tier) <= limit


def listed_billions(name: str) -> float:
    """Return the parameters that the list of configurations gives, in billions."""
    text = (SHARED / "SOURCES.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^- {re.escape(name)} \| \w+ \| ([\d.]+) \|", text, re.MULTILINE)
    return float(row)


@NEEDED
@pytest.mark.parametrize(("name", "machine"), PAIRS)
def test_config_plans_on_a_machine(name: str, machine: str) -> None:
    found = planned(SHARED / "configs" / name / "config.json", machine)
    check(found)
    assert found.request.anatomy.num_params / 1e9 == pytest.approx(listed_billions(name), abs=6e-4)


@NEEDED
@pytest.mark.parity
@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.parent.name)
def test_every_config_plans_on_every_machine(file: Path, machine: str) -> None:
    found = planned(file, machine)
    check(found)
    assert found.request.anatomy.num_params / 1e9 == pytest.approx(
        listed_billions(file.parent.name), abs=6e-4
    )
