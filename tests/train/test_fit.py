"""A run from Python is that of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import megatrain
from megatrain.config import dump_config
from tests.train.project import make_config
from tests.train.test_loop import rows_of


def test_fit_takes_a_file_or_mappings_overrides_and_callbacks(tmp_path: Path) -> None:
    class Counting(TrainerCallback):
        steps = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1

    config = make_config(tmp_path, "a", optim={"warmup_steps": 0})
    counting = Counting()
    run = megatrain.fit(config.model_dump(mode="json"), "train.steps=2", callbacks=[counting])
    assert (run, counting.steps) == (tmp_path / "a", 2)
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    other = megatrain.fit(file, "max_steps=2", f"out={tmp_path / 'b'}")
    assert [row["loss"] for row in rows_of(other)] == [row["loss"] for row in rows_of(run)]
    with pytest.raises(
        megatrain.ConfigError, match=r"settings: there is no key train\.step; did you mean train\.s"
    ):
        megatrain.fit({"train": {"step": 1}, "model": {"path": "m"}, "data": {"path": "d"}})
