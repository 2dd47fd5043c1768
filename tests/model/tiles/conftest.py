"""Short rows pass attention in groups of heads here, as long ones do."""

from __future__ import annotations

import pytest

from megatrain.model.tiles import attention


@pytest.fixture(autouse=True)
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of any length pass in groups."""
    monkeypatch.setattr(attention, "LEAST_IN_GROUPS", 0)
