"""The facts of an optimizer, without its kernels: state per parameter, traffic of an update, settings.

Memory is planned, allocated, cut among ranks and saved from this description alone. The kernels are the
package of the same name in `megatrain.optim`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from megatrain.errors import ConfigError

Element = Literal["float32", "bfloat16", "uint8"]
"""The type of a plane, as torch names it: who only counts bytes loads no torch."""

ELEMENT_BYTES: dict[Element, int] = {"float32": 4, "bfloat16": 2, "uint8": 1}

SCALE_NUMEL = 256
"""Elements that share a scale: 4 units of the layout's alignment, 1.6 % more bytes than none would take."""


def num_scales(numel: int) -> int:
    """Return how many scales a plane of a parameter of `numel` elements has.

    Scales belong to one parameter: its last group may be shorter, and no group spans two. So how a model is
    cut into blocks of layers or fragments changes no bit.
    """
    return -(-numel // SCALE_NUMEL)


class Grain(str, Enum):
    """The smallest piece of a parameter whose state may be kept, updated and given to a rank by itself."""

    ELEMENT = "element"
    """Each element is updated from its own gradient and state: ranges are cut at the layout's alignment."""
    ROW = "row"
    """An update needs whole rows of a matrix, as factored moments do."""
    MATRIX = "matrix"
    """An update needs a whole matrix, as orthogonalised momentum does: one rank owns it."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of state, in an arena of its own."""

    element: Element
    is_scale: bool = False
    """The plane has one value for each group of `SCALE_NUMEL` elements, and not one for each element."""

    def numel(self, num_state: int, num_scales: int) -> int:
        """Return the elements of the plane for so many state elements, which have so many scales."""
        return num_scales if self.is_scale else num_state


@dataclass(frozen=True, slots=True)
class Setting:
    """A hyper-parameter that groups of parameters may have."""

    default: Any
    allowed: str
    """The values to use, for the sentence that refuses a value."""
    holds: Callable[[Any], bool]
    """Whether a value is allowed."""


def is_rate(value: Any) -> bool:
    """Whether a value is a finite number of 0 or more."""
    return 0.0 <= value < math.inf


RATE = "use a finite number of 0 or more"
COMMON = {"lr": Setting(1e-3, RATE, is_rate), "weight_decay": Setting(0.1, RATE, is_rate)}
"""The settings of every optimizer: the learning rate, which schedules change, and the decoupled decay."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Optimizer:
    """An optimizer whose state is kept in one of its formats."""

    name: str
    """The setting `optim.name`."""
    state: str
    """The format: the setting `optim.state`."""
    summary: str
    """The few words with which a plan describes the state beside the precision."""
    planes: Mapping[str, Plane]
    """The planes beside the fp32 masters, by the names that memory reports and checkpoints have for them."""
    settings: Mapping[str, Setting]
    """The hyper-parameters, beside those of all optimizers."""
    flops: int
    """Floating-point operations per element of an update."""
    device_bytes: int
    """Device memory that torch's operations of an update there read and write per element."""
    scratch_bytes: int
    """Scratch memory per element of such a pass."""
    grain: Grain = Grain.ELEMENT
    is_exact: bool = True
    """Training gives the bits of the textbook's optimizer on fp32 masters."""
    caveat: str = ""
    """The warning that a plan gives of a format that is not exact."""
    draws_noise: bool = False
    """State is rounded at random, by a key of each parameter, so a range that is updated is of one."""
    goes_on_drives: bool = True
    """The state may live on drives."""
    may_fuse: bool = False
    """One kernel updates a block on an accelerator, where the machine's compiler takes it."""
    usual_rate: float | None = None
    """Updates per second on a host that has not measured them, over those of AdamW with moments in fp32.
    None: as many as its bytes allow."""
    rate_name: str | None = None
    """The name of these updates' rate in a machine's file; None: it follows from name and format."""

    def __eq__(self, other: object) -> bool:
        """Whether the other one is the same optimizer, with its state in the same format."""
        return isinstance(other, Optimizer) and (self.name, self.state) == (other.name, other.state)

    def __hash__(self) -> int:
        """Hash what is compared."""
        return hash((self.name, self.state))

    def require_elements(self, who: str) -> None:
        """Refuse an optimizer of a coarser grain where state is cut between any two elements.

        Args:
            who: What cuts there, as the subject of a sentence.

        Raises:
            ConfigError: An update needs whole rows or matrices.
        """
        if self.grain is not Grain.ELEMENT:
            raise ConfigError(
                f"optim.name is {self.name}, whose update needs a whole {self.grain.value} of a parameter, "
                f"but {who} its state anywhere; use an optimizer of single elements, such as adamw"
            )

    @property
    def has_scales(self) -> bool:
        """Whether elements share scales, which a cut must not divide."""
        return True in [plane.is_scale for plane in self.planes.values()]

    @property
    def bytes_per_element(self) -> float:
        """Bytes of the planes per element, scales included."""
        nbytes = (
            plane.numel(SCALE_NUMEL, 1) * ELEMENT_BYTES[plane.element] for plane in self.planes.values()
        )
        return sum(nbytes) / SCALE_NUMEL

    def compresses(self, other: Optimizer) -> bool:
        """Whether this keeps what another format of the optimizer keeps, in fewer bytes."""
        return other.planes.keys() <= self.planes.keys() and self.bytes_per_element < other.bytes_per_element

    @property
    def rate_key(self) -> str:
        """Return what a machine's file calls the rate of these updates."""
        return self.rate_name or f"{self.name} {self.state}"

    def describe(self) -> str:
        """Return the format's name, labelled where it is not exact."""
        return self.state if self.is_exact else f"{self.state} (not exact)"

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse hyper-parameters that this optimizer does not take.

        Raises:
            ConfigError: One is out of range, or unknown.
        """
        known = COMMON | dict(self.settings)
        for name, value in group.items():
            if name not in known:
                raise ConfigError(f"{self.name} has no {name}; it takes {', '.join(known)}")
            if not known[name].holds(value):
                raise ConfigError(f"{name} is {value}; {known[name].allowed}")

    def defaults(self) -> dict[str, Any]:
        """Return the hyper-parameters of who says none."""
        return {name: setting.default for name, setting in (COMMON | dict(self.settings)).items()}
