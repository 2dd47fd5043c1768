"""What an engine puts over a model on the instance, and takes away again: forwards, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatrain.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Overrides:
    """The attributes and hooks that take the place of those of a model's classes."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Override nothing yet."""
        self._model = model
        self._modules: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let `forward` run in place of the module's own."""
        forward.__wrapped__ = module.forward  # type: ignore[attr-defined]  # inspect.signature sees the model's own
        module.__dict__["forward"] = forward
        self._modules.append(module)

    def before_state_dict(self, module: nn.Module, function: Callable[[], None]) -> None:
        """Call `function` before the module's state is read."""
        self._hooks.append(module.register_state_dict_pre_hook(lambda *_: function()))

    def refuse_moves(self) -> None:
        """Refuse to move, cast or copy the model."""
        self._model.__dict__["_apply"] = self._refuse_apply
        self._model.__dict__["__deepcopy__"] = self._refuse_copy

    def remove(self) -> None:
        """Let the classes' own attributes be seen again."""
        for module in self._modules:
            del module.__dict__["forward"]
        self._modules.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._model.__dict__.pop("_apply", None)
        self._model.__dict__.pop("__deepcopy__", None)

    def _refuse_apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        probe = torch.zeros(1, dtype=next(self._model.parameters()).dtype)
        moved = function(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            raise ModelError(
                "the model is attached to an engine, which owns its device and dtype; "
                "call engine.detach() before .to(), .cuda() or .half()"
            )
        return self._model

    def _refuse_copy(self, _: dict[int, Any]) -> PreTrainedModel:
        raise ModelError(
            "the model is attached to an engine; copy it before megatrain.attach, or load it twice"
        )
