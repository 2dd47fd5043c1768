"""Train language models whose state is larger than the GPU, in full precision, exactly.

The public names resolve on first use (PEP 562): `import megatrain` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from megatrain.stream.attach import attach, reattach
    from megatrain.stream.engine import Engine
    from megatrain.stream.load import load
    from megatrain.train.commands.fit import fit

__version__ = "0.1.0"

_HOMES = {
    "Choice": "megatrain.config.choice",
    "StepBatch": "megatrain.config.choice",
    "Tiers": "megatrain.store.placement",
    "Engine": "megatrain.stream.engine",
    "attach": "megatrain.stream.attach",
    "reattach": "megatrain.stream.attach",
    "load": "megatrain.stream.load",
    "fit": "megatrain.train.commands.fit",
    "MegatrainError": "megatrain.errors",
    "CallbackError": "megatrain.errors",
    "CapacityError": "megatrain.errors",
    "CheckpointError": "megatrain.errors",
    "ConfigError": "megatrain.errors",
    "DataError": "megatrain.errors",
    "DivergedError": "megatrain.errors",
    "ModelError": "megatrain.errors",
    "OutputError": "megatrain.errors",
    "TornStateError": "megatrain.errors",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
