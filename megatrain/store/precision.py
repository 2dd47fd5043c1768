"""The precision in which a state keeps its weights."""

from __future__ import annotations

from enum import Enum

from megatrain.config.choice import read_member


class Precision(str, Enum):
    """How weights are kept: `fp32` is its own master; `bf16` is a split fp32 master."""

    FP32 = "fp32"
    BF16 = "bf16"


def read_precision(name: str) -> Precision:
    """Return the precision of that name.

    Raises:
        ConfigError: There is none.
    """
    return read_member(Precision, name, "precision")
