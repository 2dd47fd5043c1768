"""What an engine puts over a model on the instance, and takes away again: forwards, and refusals."""

from __future__ import annotations

import functools
import threading
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


USE_OURS = (
    "use megatrain.hf.StreamingTrainer in place of Trainer, and StreamingSFTTrainer, StreamingDPOTrainer or "
    "StreamingKTOTrainer in place of TRL's, arguments as they are"
)
"""The change of one line that whoever meets a refusal has to make."""
_USE_OURS = f"{USE_OURS}; in a loop of yours, train with engine.adamw(...)"


_watching: tuple[weakref.ref[ForeignOptimizers], ...] = ()
"""Those whose models are attached. It is replaced and never changed, since any thread may be reading it."""

_changing = threading.RLock()


@functools.cache
def _watch_optimizers() -> None:
    """Have each step of an optimizer looked at, from now to the end of the process.

    The hook stays: torch iterates over its hooks, and removing one when an engine is collected, which may be
    in the middle of a step, would end that step.
    """

    def hook(optimizer: Optimizer, *_: Any) -> None:
        for reference in _watching:
            foreign = reference()
            if foreign is not None:
                foreign.refuse(optimizer)

    register_optimizer_step_pre_hook(hook)


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
        _watch_optimizers()
        self._set_watching(True)

    def remove(self) -> None:
        """Refuse nothing from now on."""
        self._set_watching(False)

    def _set_watching(self, is_watching: bool) -> None:
        global _watching
        with _changing:
            others = tuple(reference for reference in _watching if reference() not in (None, self))
            _watching = (*others, weakref.ref(self)) if is_watching else others

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer that holds weights of the model.

        Raises:
            ModelError: It does, and is not the engine's.
        """
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


def _is_at(device: torch.device, *places: torch.device) -> bool:
    """Whether a device is one of some, of which one without a number is any of its kind."""
    return any(device.type == at.type and at.index in (None, device.index) for at in places)


class Overrides:
    """The attributes and hooks that take the place of those of a model's classes."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Override nothing yet."""
        self._model = model
        self._forward: Callable[..., Any] | None = None
        self._before: dict[nn.Module, Callable[..., Any] | None] = {}
        """By module, the forward that its instance had, if it had one."""
        self._undo: list[Callable[[], object]] = []
        self._hooks: list[RemovableHandle] = []
        self._foreign: ForeignOptimizers | None = None

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let `forward` run in place of the one that the module has now, which comes back in the end."""
        self._before[module] = module.__dict__.get("forward")
        if module is self._model:
            self._forward = forward
        forward.__wrapped__ = module.forward  # type: ignore[attr-defined]  # inspect.signature sees the model's own
        module.__dict__["forward"] = forward

    def on_removal(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the overrides are removed."""
        self._undo.append(undo)

    def put(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        """Put a method over one of the module's class."""
        module.__dict__[name] = method
        self._undo.append(lambda: module.__dict__.pop(name, None))

    def before_call(self, module: nn.Module, function: Callable[..., None]) -> None:
        """Call `function` before the module is called."""
        self._hooks.append(module.register_forward_pre_hook(function))

    def before_state_dict(self, module: nn.Module, function: Callable[[], None]) -> None:
        """Call `function` before the module's state is read."""
        self._hooks.append(module.register_state_dict_pre_hook(lambda *_: function()))

    def refuse_moves(self, device: torch.device) -> None:
        """Refuse to cast or copy the model, or to move it to another device than this, where it computes."""
        self._device = device
        self._model.__dict__["_apply"] = self._refuse_apply
        self._model.__dict__["__deepcopy__"] = self._refuse_copy

    def refuse_optimizers(self, parameters: Mapping[str, Tensor], own: type[Optimizer]) -> None:
        """Refuse the steps of optimizers of other types than `own` that hold some of `parameters`."""
        self._foreign = ForeignOptimizers(parameters, own)

    def require_own_forward(self) -> None:
        """Refuse a call of the decoder by something that has taken the place of the model's forward.

        Raises:
            ModelError: The caller would compute the loss from weights that the engine does not update.
        """
        if not self.is_own_forward():
            raise ModelError(
                "the model's forward was replaced after megatrain.attach by one that computes the loss past "
                f"the engine; the trainers of TRL do that: {_USE_OURS}; if the forward is yours, call "
                "engine.adopt_forward()"
            )

    def is_own_forward(self) -> bool:
        """Whether the model's forward is the one that `replace` put there, or leads to it."""
        found: Any = self._model.forward
        while found is not None:  # wrappers, such as accelerate's for mixed precision, lead to ours
            if getattr(found, "__func__", found) is self._forward:
                return True
            found = getattr(found, "__wrapped__", None)
        return False

    def remove(self) -> None:
        """Let the classes' own attributes be seen again."""
        if self._foreign is not None:
            self._foreign.remove()
        for module, forward in self._before.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
        self._before.clear()
        for undo in self._undo:
            undo()
        self._undo.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._model.__dict__.pop("_apply", None)
        self._model.__dict__.pop("__deepcopy__", None)

    def _refuse_apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        probe = torch.zeros(1, dtype=next(self._model.parameters()).dtype)
        moved = function(probe)
        # Trainer and accelerate move every model to where they compute: that is where this one computes
        if not _is_at(moved.device, probe.device, self._device) or moved.dtype != probe.dtype:
            raise ModelError(
                "the model is attached to an engine, which owns its device and dtype; "
                "call engine.detach() before .to(), .cuda() or .half()"
            )
        return self._model

    def _refuse_copy(self, _: dict[int, Any]) -> PreTrainedModel:
        raise ModelError(
            "the model is attached to an engine; copy it before megatrain.attach, or load it twice"
        )
