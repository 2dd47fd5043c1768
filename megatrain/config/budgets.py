"""Budgets of compiled layers: how much of what they would keep for their backward they may keep.

torch's partitioner decides what to compute again in the backward, and takes what is cheapest first
(`activation_memory_budget` of `torch._functorch.config`). What is fused with what depends on it, and so do
the last bits of results: a run has one budget, which is chosen once. Loads neither pydantic nor torch.
"""

from __future__ import annotations

from megatrain.errors import ConfigError

ALL = 1.0
"""All that is dear to compute stays."""

BUDGETS = (ALL, 0.7, 0.5, 0.3)
"""The budgets that are counted; of a Llama's layer 0.7 computes no matrix product again."""


def require_budget(value: float) -> None:
    """Refuse a budget that is not counted.

    Raises:
        ConfigError: It is none of `BUDGETS`.
    """
    if value not in BUDGETS:
        known = ", ".join(map(str, BUDGETS[:-1]))
        raise ConfigError(f"a budget of compiled layers is {known} or {BUDGETS[-1]}, not {value}")


def require_compile(value: str) -> None:
    """Refuse a word that does not say whether layers are compiled.

    Raises:
        ConfigError: It is not `auto`, `on` or `off`.
    """
    if value not in ("auto", "on", "off"):
        raise ConfigError(f"compile is {value!r}; use auto, on or off")
