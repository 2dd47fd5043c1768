"""The callbacks of a trainer of several ranks, where all ranks obey those of the first one.

Every rank calls its callbacks, and one may look at the clock, at a signal, or at its own number. What
callbacks set in the trainer's control at other times, such as within a step, waits until the ranks agree.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from megatrain.train.callbacks.calls import wishes_of

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)


def say_who_looks_at_gradients(callbacks: Iterable[TrainerCallback]) -> None:
    """Warn of callbacks that are called before an optimizer's step: `parameter.grad` is None for them."""
    for callback in callbacks:
        if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            _log.warning(
                "%s.on_pre_optimizer_step: gradients are in the engine, and parameter.grad is None; "
                "trainer.engine.named_gradients() yields them, and max_grad_norm or parameter.register_hook "
                "changes them",
                type(callback).__name__,
            )


class FirstDecides:
    """The control of a trainer, for as long as it trains."""

    def __init__(self, ranks: Ranks | Alone, trainer: Any) -> None:
        """Wrap a trainer; nothing waits yet."""
        self._ranks, self._trainer = ranks, trainer
        self._waiting: dict[str, bool] = {}
        self._are_together = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Call callbacks in a way that keeps ranks together, if there are several."""
        if self._ranks.size == 1:  # what a callback wishes is done at once
            yield
            return
        handler = self._trainer.callback_handler
        self._call = handler.call_event
        handler.call_event = self._call_event
        try:
            yield
        finally:
            del handler.call_event

    @contextmanager
    def together(self) -> Iterator[None]:
        """Agree on the wishes so far, and inside after each callback; all ranks call the same ones."""
        self._agree(self._trainer.control)
        self._are_together = True
        try:
            yield
        finally:
            self._are_together = False

    def _call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        before = dict(vars(control))
        control = self._call(event, args, state, control, **kwargs)
        if self._are_together and event != "on_prediction_step":
            self._agree(control)
            return control
        self._waiting |= {name: flag for name, flag in vars(control).items() if flag != before[name]}
        vars(control).update(before)
        return control

    def _agree(self, control: Any) -> None:
        vars(control).update(self._ranks.tell(wishes_of(vars(control) | self._waiting)))
        self._waiting.clear()
