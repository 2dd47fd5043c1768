"""Every real configuration plans on every bundled machine, in seconds and without an exception."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from megatrain.config import build_config
from megatrain.hardware import load_machine, machine_names
from megatrain.plan.search.planner import make_plan
from megatrain.train.caller import Caller
from megatrain.train.planning.asking import make_request
from megatrain.train.planning.counting import PlannedModel, device_type
from megatrain.train.planning.plan_run import Planned, plan_run
from tests.searches import planned_for_a_moment
from tests.train.project import decided

SHARED = Path(__file__).parents[4] / "shared/data"
CONFIGS = sorted((SHARED / "configs").glob("*/config.json")) if SHARED.is_dir() else []
NAMES = [file.parent.name for file in CONFIGS]
NEEDED = pytest.mark.skipif(not CONFIGS, reason="no configurations in ../shared/data")
PAIRS = [
    ("gpt2", "cpu-laptop"),
    ("Llama-3.1-8B", "rtx-4090"),
    ("Llama-3.1-405B", "h200"),
    ("gpt-oss-120b", "b200"),
    ("gemma-3-27b-it", "gh200"),
]
"""Dense, of experts, with images, too large; a CPU, a desktop, servers."""
SAMPLE = [
    (*pair, *more)
    for pair, more in zip(
        PAIRS, [(True, False), (True, True), (False, True), (False, False), (True, True)], strict=True
    )
]
"""The same, clipped or not, with drives or without."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where counts are kept between tests."""
    return tmp_path_factory.mktemp("counts")


def planned(file: Path, machine: str, counts: Path) -> Planned:
    raw = {"model": {"path": str(file)}, "train": {"micro_batch_size": 1}}
    spec = load_machine(machine)
    return plan_run(raw, spec, source="test", hf_config=file, caller=Caller(counts=counts))


def check(found: Planned) -> None:
    plan = found.plan
    assert plan.fits != bool(plan.problem)
    assert plan.step_s >= max(plan.bounds_s.values()) * (1 - 1e-6) > 0
    assert 0 < plan.mfu < 1
    if plan.fits:
        for tier, limit in plan.limits.items():
            assert plan.tier_bytes(tier) <= limit


def listed_billions(name: str) -> float:
    """Return the parameters that the list of configurations gives, in billions."""
    text = (SHARED / "SOURCES.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^- {re.escape(name)} \| \w+ \| ([\d.]+) \|", text, re.MULTILINE)
    return float(row)


@pytest.mark.sampled(2)
@NEEDED
@pytest.mark.parametrize(
    ("name", "machine"),
    [
        pytest.param(*pair, marks=[] if number == 1 else [pytest.mark.parity])
        for number, pair in enumerate(PAIRS)
    ],
)
def test_config_plans_on_a_machine(name: str, machine: str, counts: Path) -> None:
    with planned_for_a_moment(2000):
        found = planned(SHARED / "configs" / name / "config.json", machine, counts)
    check(found)
    assert found.request.anatomy.num_params / 1e9 == pytest.approx(listed_billions(name), abs=6e-4)


@NEEDED
@pytest.mark.parity
@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.parent.name)
def test_every_config_plans_on_every_machine(file: Path, machine: str, counts: Path) -> None:
    found = planned(file, machine, counts)
    check(found)
    assert found.request.anatomy.num_params / 1e9 == pytest.approx(
        listed_billions(file.parent.name), abs=6e-4
    )


def check_bounds(name: str, machine: str, counts: Path, *, clips: bool, has_drives: bool) -> None:
    """What a search finds in a moment will do: each choice that it times is held against its bounds."""
    file = SHARED / "configs" / name / "config.json"
    config = decided(build_config(_with_a_large_batch(file, clips=clips), source="test"))
    model = PlannedModel(str(file), counts, lambda doing: None)
    spec = load_machine(machine)
    if not has_drives:
        spec = spec.with_drive_bytes(0)
    elif spec.drives is None:
        spec = spec.with_drive_bytes(8 * 10**12)
    request = make_request(config, model.count(config, device_type(spec)), spec)
    plan = make_plan(request, budget=2000)
    assert plan.step_s >= max(plan.bounds_s.values()) * (1 - 1e-6) > 0
    assert plan.bytes_per_step["drive_written"] == 0 or has_drives


@pytest.mark.sampled(2)
@NEEDED
@pytest.mark.parametrize(
    ("name", "machine", "clips", "has_drives"),
    [
        pytest.param(*row, marks=[pytest.mark.parity] if number in (1, 3) else [])
        for number, row in enumerate(SAMPLE)
    ],
)
def test_no_plan_is_faster_than_its_bounds(
    name: str, machine: str, clips: bool, has_drives: bool, counts: Path
) -> None:
    check_bounds(name, machine, counts, clips=clips, has_drives=has_drives)


@NEEDED
@pytest.mark.parity
@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.parametrize("name", NAMES)
def test_no_plan_of_any_kind_is_faster_than_its_bounds(name: str, machine: str, counts: Path) -> None:
    for clips, has_drives in product((True, False), repeat=2):
        check_bounds(name, machine, counts, clips=clips, has_drives=has_drives)


def _with_a_large_batch(file: Path, *, clips: bool) -> dict[str, dict[str, object]]:
    return {
        "model": {"path": str(file)},
        "data": {"path": "none", "seq_len": 1024 if file.parent.name == "gpt2" else 4096},
        "train": {"precision": "bf16", "micro_batch_size": 1, "grad_accumulation": 32},
        "optim": {"max_grad_norm": 1.0 if clips else None, "updates": "deferred" if clips else "auto"},
    }
