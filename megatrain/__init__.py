"""Train language models whose state is larger than the GPU, in full precision, exactly.

The public names resolve on first use (PEP 562): `import megatrain` loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.lazy import resolver
from megatrain.versions import __version__

if TYPE_CHECKING:
    from megatrain.config.choice import Choice, StepBatch
    from megatrain.errors import (
        CallbackError,
        CapacityError,
        CheckpointError,
        ConfigError,
        DataError,
        DivergedError,
        MegatrainError,
        ModelError,
        OutputError,
        TornStateError,
    )
    from megatrain.store.placement import Tiers
    from megatrain.stream.attach.attach import attach, reattach
    from megatrain.stream.attach.load import load
    from megatrain.stream.engine import Engine
    from megatrain.train.commands.fit import fit

__all__ = [
    "CallbackError",
    "CapacityError",
    "CheckpointError",
    "Choice",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Engine",
    "MegatrainError",
    "ModelError",
    "OutputError",
    "StepBatch",
    "Tiers",
    "TornStateError",
    "__version__",
    "attach",
    "fit",
    "load",
    "reattach",
]


__getattr__ = resolver(
    __name__,
    {
        "config.choice": ("Choice", "StepBatch"),
        "store.placement": ("Tiers",),
        "stream.engine": ("Engine",),
        "stream.attach.attach": ("attach", "reattach"),
        "stream.attach.load": ("load",),
        "train.commands.fit": ("fit",),
        "errors": [name for name in __all__ if name.endswith("Error")],
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
