"""The one list of optimizers. To add one: its description beside this file, and a package of kernels.

Nothing else compares with the name of an optimizer, of a format or of a plane.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.config.optimizers import adamw, signsgd
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.errors import ConfigError, one_of

OPTIMIZERS: dict[str, Sequence[Optimizer]] = {
    formats[0].name: formats for formats in (adamw.FORMATS, signsgd.FORMATS)
}
"""The formats of each optimizer by its name, the default ones first."""

DEFAULT = adamw.FP32
"""The optimizer of a run that names none; rates of a machine are counted in its updates."""

_, *OTHERS = (each for formats in OPTIMIZERS.values() for each in formats)
"""All formats of all optimizers but that, which is the first."""

STATES = tuple(dict.fromkeys(each.state for formats in OPTIMIZERS.values() for each in formats))
"""The names of all formats."""


def find(name: str, state: str) -> Optimizer:
    """Return the optimizer of that name with its state in that format.

    Raises:
        ConfigError: There is none.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"the optimizer is {name!r}; use {one_of(OPTIMIZERS)}")
    for found in OPTIMIZERS[name]:
        if found.state == state:
            return found
    raise ConfigError(
        f"the optimizer's state is {state!r}; use {one_of([each.state for each in OPTIMIZERS[name]])}"
    )
