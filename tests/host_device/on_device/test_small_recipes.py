"""Recipes of models with experts in small on the test device, whose lanes are those of an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.host_device.device import register
from tests.test_small_recipes import RECIPE, check_small_run

register()


@pytest.mark.parity
@pytest.mark.parametrize("name", RECIPE)
def test_a_recipe_runs_in_small_to_the_bits_of_a_resident_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.stream.meter.measure_matmul_peak", lambda *_: 1e12)
    monkeypatch.setattr("megatrain.stream.machine.measure_matmul_peak", lambda *_: 1e12)
    check_small_run(name, tmp_path, device="auto")
