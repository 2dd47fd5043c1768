"""Trains a run on the test device: `python -m tests.host_device.on_device.train_one ROOT OUT STEPS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatrain.train.loop import train
from tests.host_device.device import register
from tests.train.project import make_config


def sections(*, steps: int, memory: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of a run with dropout and a checkpoint every other step; `auto` is the device."""
    return {
        "train": {"device": "auto", "steps": steps},
        "optim": {"warmup_steps": 1},
        "memory": {"num_slots": 2, **memory},
        "checkpoint": {"every": 2},
    }


if __name__ == "__main__":
    register()
    chosen = sections(steps=int(sys.argv[3]), memory={"activations": "recompute", "lockstep": 2})
    train(make_config(Path(sys.argv[1]), sys.argv[2], **chosen))
