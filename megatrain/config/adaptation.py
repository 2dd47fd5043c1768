"""The trained part of a model: chosen parameters, or adapters beside it; plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

ALL_LINEAR = "all-linear"
"""The value for every linear layer but the head."""


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
    """The modules of the base that are trained too, as they are."""
    trains_embeddings: bool = False
    """Whether the embedding and the head are among these, by whatever names, for new tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """The trained part of a model, where that is not simply everything."""

    lora: LoraChoice | None = None
    freeze: tuple[str, ...] = ()
    """The shell patterns of the names of parameters that are not trained."""
    only: tuple[str, ...] = ()
    """The shell patterns of the names of the only trained parameters; empty means all."""
