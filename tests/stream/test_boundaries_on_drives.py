"""Saved activations that wait on drives: the same bits, a few host buffers, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.store.drives import system as calls
from megatrain.store.placement import Tiers
from megatrain.stream.engine import Engine
from tests.store.disks import Counted
from tests.stream.runs import assert_same_steps, start


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "system", Counted())


def begin(root: Path, *, num_drives: int = 1, **settings: Any) -> tuple[Any, Any, Engine, Any]:
    """Make a resident and a streamed run whose smallest tensors go to drives, in chunks of two pages."""
    tiers = Tiers(nvme=tuple(root / f"drive{n}" for n in range(num_drives)), ram=1 << 30)
    model, reference, engine, optimizer = start(boundaries="nvme", tiers=tiers, **settings)
    engine.executor.stash._min_bytes = 1
    assert engine._scratch is not None
    engine._scratch.chunk_bytes = 8192
    return model, reference, engine, optimizer


@pytest.mark.parametrize("activations", ["recompute", "recompute_cheap", "offload", "drop_boundary"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "checked", "emulated"])
def test_activations_on_drives_change_no_bit(
    device: str, num_micro_batches: int, activations: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"device": device, "activations": activations, "lockstep": num_micro_batches}
    _, reference, engine, optimizer = begin(
        tmp_path, num_drives=2, num_micro_batches=num_micro_batches, **settings
    )
    assert_same_steps(engine, optimizer, reference, num_micro_batches=num_micro_batches)
    assert min(engine.executor.stash.drive_bytes) > 0
    engine.detach()
