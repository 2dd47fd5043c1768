"""Checkpoints and settings of an earlier version: today's code loads them, and goes on to the same bits.

What is loaded is compared to the bit on every machine. So is what two more steps give, where plain torch
computes what it did on the machine that wrote the checkpoints; elsewhere it has to be close, since matrix
products of other processors differ in their last bits.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import yaml

from megatrain.config import dump_config, load_config
from megatrain.config.optimizers.registry import OPTIMIZERS
from megatrain.objective.registry import OBJECTIVES
from tests.train.golden.cases import CASES, DATA, go_on, kernels, laid_out, settings_of


@cache
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "digests.json").read_text())
    return found


def test_every_optimizer_and_objective_has_a_checkpoint_of_before() -> None:
    """What is new in a version gets one (`python -m tests.train.golden.make`), before the next version."""
    cases = [settings_of(name) for name in kept()["runs"]]
    named = {"adamw"} | {case["optim"].get("name") for case in cases}
    trained = {"sft"} | {case["train"].get("loss") for case in cases}
    assert named >= set(OPTIMIZERS)
    assert trained >= set(OBJECTIVES) - {"simpo"}  # whose rows, losses and state are those of orpo


def test_a_checkpoint_of_before_is_small() -> None:
    sizes = {
        name: sum(file.stat().st_size for file in (DATA / name).rglob("*") if file.is_file())
        for name in CASES
    }
    assert max(sizes.values()) <= 100_000, sizes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_before_is_loaded_and_goes_on_to_the_same_bits(name: str) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    with laid_out(name) as root:
        found, expected = go_on(root), kept()["runs"][name]
    assert found["loaded"] == expected["loaded"]
    if kernels() == expected.get("kernels", kept()["kernels"]):
        assert found == {key: value for key, value in expected.items() if key != "kernels"}
    for told in ("losses", "grad_norms"):
        assert found[told] == pytest.approx(expected[told], rel=0.01), told


def test_every_setting_of_before_is_read_as_it_was() -> None:
    """A later version may have more of them."""
    file = DATA / "settings.yaml"
    before, now = yaml.safe_load(file.read_text()), yaml.safe_load(dump_config(load_config(file)))
    for section, values in before.items():
        if isinstance(values, dict):
            assert {key: now[section][key] for key in values} == values
        else:
            assert now[section] == values
