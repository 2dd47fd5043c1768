"""How AdamW's two moments are kept: exactly, or in fewer bytes, which is opt-in and not exact.

| format | planes per trained element | bytes |
|---|---|---|
| fp32 | `exp_avg`, `exp_avg_sq` in fp32 | 8 |
| bf16 | both in bf16, rounded stochastically | 4 |
| int8 | a code of 8 bits each; one fp32 scale each per `SCALE_NUMEL` elements | 2.03 |

Scales belong to one parameter: the last block of a parameter may be shorter, and none spans two. So how a
model is cut into blocks of layers or fragments changes no bit.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from megatrain.config.choice import read_member

Element = Literal["float32", "bfloat16", "uint8"]
"""Of a plane, as torch names its type: who only counts bytes loads no torch."""

ELEMENT_BYTES: dict[Element, int] = {"float32": 4, "bfloat16": 2, "uint8": 1}

SCALE_NUMEL = 256
"""Elements that share a scale: 4 units of the layout's alignment, 1.6 % more bytes than none would take."""


class MomentFormat(str, Enum):
    """How the moments are kept: the setting `optim.state`."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"

    @classmethod
    def read(cls, name: str) -> MomentFormat:
        """Return the format of that name.

        Raises:
            ConfigError: There is none.
        """
        return read_member(cls, name, "the optimizer's state")

    @property
    def is_exact(self) -> bool:
        """Whether training gives the bits of ordinary AdamW."""
        return self is MomentFormat.FP32

    def describe(self) -> str:
        """Return the format's name, labelled where it is not exact."""
        return self.value if self.is_exact else f"{self.value} (not exact)"


MOMENT_PLANES = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
"""Names of all planes that a format may have."""


def num_scales(numel: int) -> int:
    """Return how many scales a moment of a parameter of `numel` elements has."""
    return -(-numel // SCALE_NUMEL)


def moment_planes(num_state: int, num_scales: int, moments: MomentFormat) -> dict[str, tuple[int, Element]]:
    """Return the elements and the type of each plane of the moments.

    Args:
        num_state: State elements of a block, or of several.
        num_scales: Of one moment of theirs in `int8`.
        moments: The format.
    """
    elements: dict[MomentFormat, Element] = {
        MomentFormat.FP32: "float32",
        MomentFormat.BF16: "bfloat16",
        MomentFormat.INT8: "uint8",
    }
    moment = num_state, elements[moments]
    planes: dict[str, tuple[int, Element]] = {"exp_avg": moment, "exp_avg_sq": moment}
    if moments is MomentFormat.INT8:
        planes |= {"exp_avg_scale": (num_scales, "float32"), "exp_avg_sq_scale": (num_scales, "float32")}
    return planes
