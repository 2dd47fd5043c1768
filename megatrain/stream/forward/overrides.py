"""What an engine puts over a model on the instance, and takes away again: forwards, and refusals."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatrain.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_USE_OURS = (
    "use the engine's own optimizer: engine.adamw(...) in a loop of yours, "
    "transformers.Trainer(..., optimizers=(engine.adamw(...), None)), or `megatrain train`"
)


class ForeignOptimizers:
    """Refuses the steps of optimizers that hold weights of a model and are not the engine's.

    Such an optimizer finds no gradient, whether it was made before the engine or after, and Trainer, which
    makes one unless it is given ours, would report losses of a model that does not change.
    """

    def __init__(self, parameters: Mapping[str, Tensor], own: type[Optimizer]) -> None:
        """Watch every optimizer of the process until `remove`, or until nobody refers to this any more."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._storages = {_storage(parameter) for parameter in parameters.values()} - {0}
        self._parameters = list(parameters.values())  # as long as they live, their ids are theirs
        self._own = own
        method = weakref.WeakMethod(self._refuse)

        def hook(optimizer: Optimizer, *_: Any) -> None:
            refuse = method()
            if refuse is not None:
                refuse(optimizer)

        self.remove = weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    def _refuse(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, self._own):
            return
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            name = self._names.get(id(parameter), "a view of the weights")
            if id(parameter) in self._names or _storage(parameter) in self._storages:
                raise ModelError(
                    f"{type(optimizer).__name__} is to train {name}, but the model is attached to an engine, "
                    f"which has the gradients, so nothing would be trained; {_USE_OURS}"
                )


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return 0


class Overrides:
    """The attributes and hooks that take the place of those of a model's classes."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Override nothing yet."""
        self._model = model
        self._forward: Callable[..., Any] | None = None
        self._modules: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        self._foreign: ForeignOptimizers | None = None

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let `forward` run in place of the module's own."""
        if module is self._model:
            self._forward = forward
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

    def refuse_optimizers(self, parameters: Mapping[str, Tensor], own: type[Optimizer]) -> None:
        """Refuse the steps of optimizers of other types than `own` that hold some of `parameters`."""
        self._foreign = ForeignOptimizers(parameters, own)

    def require_own_forward(self) -> None:
        """Refuse a call of the decoder by something that has taken the place of the model's forward.

        Raises:
            ModelError: What calls it would compute the loss from weights that the engine does not update.
        """
        found: Any = self._model.forward
        while found is not None:  # wrappers, such as accelerate's for mixed precision, lead to ours
            if getattr(found, "__func__", found) is self._forward:
                return
            found = getattr(found, "__wrapped__", None)
        raise ModelError(
            "the model's forward was replaced after megatrain.attach by one that computes the loss past the "
            "engine; the trainers of TRL do that, SFTTrainer too, so they cannot train an attached model: "
            f"{_USE_OURS}"
        )

    def remove(self) -> None:
        """Let the classes' own attributes be seen again."""
        if self._foreign is not None:
            self._foreign.remove()
        for module in self._modules:
            module.__dict__.pop("forward", None)
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
