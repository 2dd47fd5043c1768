"""The trained part of a model: chosen parameters, or adapters beside it; plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.errors import ConfigError, one_of

ALL_LINEAR = "all-linear"
"""The value for every linear layer but the head."""

DEQUANTISED, AS_STORED = "dequantised", "as_stored"
BASES = (DEQUANTISED, AS_STORED)
"""The forms in which host memory and the link have the frozen weights of a quantised checkpoint: as values,
or in its codes and scales, of which the device makes the same values."""


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
    base: str = DEQUANTISED
    """The form of the frozen weights beside adapters, one of `BASES`."""

    def __post_init__(self) -> None:
        """Check the form.

        Raises:
            ConfigError: It is none.
        """
        if self.base not in BASES:
            raise ConfigError(f"base is {self.base!r}; use {one_of(BASES)}")

    @property
    def adapts_all(self) -> bool:
        """Whether adapters are on whatever can have one."""
        return self.lora is not None and self.lora.target_modules == (ALL_LINEAR,)

    @property
    def keeps_codes(self) -> bool:
        """Whether frozen weights are kept as a quantised checkpoint has them."""
        return self.base == AS_STORED
