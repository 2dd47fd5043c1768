"""What a run is told that goes on from a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from megatrain.train.resume.changes import changed_settings, report_changes
from tests.train.project import make_config


@pytest.mark.parametrize(
    ("meta", "model", "count", "is_told"),
    [
        ({}, {"output_router_logits": True}, 4, True),
        ({}, {"output_router_logits": True}, 1, False),
        ({}, {"output_router_logits": False}, 4, False),
        ({"router_loss": "mean"}, {"output_router_logits": True}, 4, False),
    ],
)
def test_a_run_from_before_is_told_that_the_routers_loss_is_a_mean(
    meta: dict[str, Any],
    model: dict[str, bool],
    count: int,
    is_told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config(tmp_path, train={"grad_accumulation": count})
    saved = json.loads(json.dumps(config.model_dump(mode="json")))
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        report_changes(config, {"config": saved, **meta}, MixtralConfig(**model))
    assert [record.getMessage() for record in caplog.records] == [
        "from here on the loss of this model's routers (output_router_logits) is the mean over a step's 4 "
        "micro-batches; the version that wrote the checkpoint added it up, to 4 times the weight"
    ] * is_told


def test_another_length_of_tiles_is_named(tmp_path: Path) -> None:
    saved = make_config(tmp_path, train={"tile_tokens": 16}).model_dump(mode="json")
    swapped = make_config(tmp_path, train={"tile_tokens": 8})
    assert changed_settings(saved, swapped) == ["train.tile_tokens 16 -> 8"]
    left_open = make_config(tmp_path, train={"tile_tokens": "auto"})
    assert changed_settings(saved, left_open) == []


def test_another_budget_of_compiled_layers_is_named(tmp_path: Path) -> None:
    saved = make_config(tmp_path, train={"activation_budget": 0.5}).model_dump(mode="json")
    swapped = make_config(tmp_path, train={"activation_budget": 0.3})
    assert changed_settings(saved, swapped) == ["train.activation_budget 0.5 -> 0.3"]
    left_open = make_config(tmp_path, train={"micro_batch_size": "auto"})
    assert changed_settings(saved, left_open) == []
