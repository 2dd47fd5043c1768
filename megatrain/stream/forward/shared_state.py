"""What belongs to the whole model, so that micro-batches that take turns cannot each have their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatrain.errors import ConfigError


class SharedStateError(ConfigError):
    """A call that takes turns with others has changed what belongs to all of them."""


class SharedState:
    """The mode of a model, and which of PEFT's adapters are active: these are switched in all at once."""

    def __init__(self, model: nn.Module) -> None:
        """Look at `model` whenever it is asked."""
        self._model = model
        self._adapted: Any = next((m for m in model.modules() if hasattr(m, "_disable_adapters")), None)

    def now(self) -> object:
        """Return what compares equal as long as nobody changes it."""
        adapted = self._adapted
        return self._model.training, adapted and (adapted._disable_adapters, str(adapted._active_adapter))

    def require(self, before: object) -> None:
        """Refuse to go on with a model that others have changed since.

        Raises:
            SharedStateError: They have.
        """
        if before != self.now():
            raise SharedStateError(
                "a call passes the model in a mode, or with adapters, that it changes while others take "
                "turns with it at every layer; give such passes as before=[PassBefore(...)] of "
                "engine.run_losses, or use lockstep=1"
            )
