"""What of a model is trained: chosen parameters, or adapters beside it; plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

ALL_LINEAR = "all-linear"
"""Every linear layer but the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraChoice:
    """Low-rank adapters, in the terms of `peft.LoraConfig`."""

    r: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    rslora: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    """Modules of the base that are trained too, as they are."""
    trains_embeddings: bool = False
    """The embedding and the head are among these, whatever they are called: there are new tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """What of a model is trained, where that is not simply everything."""

    lora: LoraChoice | None = None
    freeze: tuple[str, ...] = ()
    """Shell patterns of the names of parameters that are not trained."""
    only: tuple[str, ...] = ()
    """Shell patterns of the names of those that are, and no others; empty: all."""
