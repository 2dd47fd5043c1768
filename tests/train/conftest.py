"""Fixtures of tests of whole runs."""

from __future__ import annotations

import pytest

from megatrain.train import spikes
from megatrain.train.spikes import Spikes


@pytest.fixture
def jump_at_5(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fifth loss of a run be a jump, whatever it is."""
    take = Spikes.take

    def told(self: Spikes, loss: float) -> float | None:
        take(self, loss)
        return 1.5 if len(self.state()) == 5 else None

    monkeypatch.setattr(spikes.Spikes, "take", told)
