"""The trackers of `log.to`, by their names in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import TrainerCallback


def is_tracker(callback: TrainerCallback) -> bool:
    """Return whether a callback is one of transformers' trackers, by whatever way a run was given it."""
    return type(callback).__module__.startswith("transformers.integrations")


def trackers(names: Sequence[str], out: Path) -> list[TrainerCallback]:
    """Make the callbacks of these names.

    Args:
        names: The names, such as `tensorboard`.
        out: The run directory. TensorBoard's files go to `tensorboard/` in it, unless its own variable
            (`TENSORBOARD_LOGGING_DIR`) names another place.

    Raises:
        ConfigError: Transformers does not know a name, or its package is not installed.
    """
    if not names:
        return []
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    made = []
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(f"log.to names {name}; transformers knows {', '.join(INTEGRATION_TO_CALLBACK)}")
        try:
            callback = INTEGRATION_TO_CALLBACK[name]()
        except (ImportError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"log.to names {name}, whose package is not installed; install it, or leave it out of log.to "
                f"({reason})"
            ) from error
        if name == "tensorboard" and callback.logging_dir is None:
            callback.logging_dir = str(out / "tensorboard")
        made.append(callback)
    return made
