"""Hooks of the user's on gradients of parameters, run on what autograd has made of them for the engine.

torch runs a parameter's hooks once in a backward, on the sum of all that comes to it there, before it adds
the result to `parameter.grad`. A micro-batch is a backward of its own, so its hooks run once, on its whole
gradient, before that is added to those of others. Where that gradient comes in parts, they cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError


class GradientHooks:
    """Runs the hooks of the parameters of one block."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Look for hooks on these parameters whenever they have gradients."""
        self._names, self._parameters = names, parameters
        self._ran: dict[str, tuple[int, int]] = {}
        """By name, in which backward of torch and for which call of a step its hooks have run last."""

    def run(
        self, grads: Sequence[Tensor | None], trained: Sequence[bool], call: int
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the `trained` parameters as their hooks leave them.

        Args:
            grads: The gradients.
            trained: The bools, one per parameter, that say whether it is trained.
            call: The call of a step to which they belong, by its place in the round; 0: they are of a
                backward that the user has called.

        Raises:
            ModelError: A hook that cannot be run as torch runs it.
        """
        parameters = self._parameters
        for parameter in parameters:
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                break
        else:  # as in most runs
            return grads
        own = [number for number, wants in enumerate(trained) if wants]
        return [
            grad if grad is None else self._changed(self._names[number], parameters[number], grad, call)
            for number, grad in zip(own, grads, strict=True)
        ]

    def _changed(self, name: str, parameter: nn.Parameter, grad: Tensor, call: int) -> Tensor:
        refuse_hooks(name, parameter)
        hooks = parameter._backward_hooks
        if not hooks:
            return grad
        now = torch._C._current_graph_task_id(), call
        if self._ran.get(name) == now:
            raise ModelError(
                f"parameter {name} has a hook (register_hook), but its gradient comes in parts: the loss "
                "passes the model more than once with gradients, or a large batch is split "
                "(micro_batch_size); pass micro-batches, and call the model once per loss"
            )
        self._ran[name] = now
        for hook in tuple(hooks.values()):
            found = hook(grad)
            grad = grad if found is None else _checked(name, grad, found)
        return grad


def refuse_hooks(name: str, parameter: nn.Parameter, *, is_shared: bool = False) -> None:
    """Refuse hooks that never could be run.

    Args:
        name: The parameter's name.
        parameter: The parameter with its hooks.
        is_shared: A claim that ranks share out rows, so each has a part of a micro-batch's gradient.

    Raises:
        ModelError: The parameter has such hooks.
    """
    if parameter._post_accumulate_grad_hooks:
        raise ModelError(
            f"parameter {name} has a hook of register_post_accumulate_grad_hook, but gradients add up in the "
            "engine and not in parameter.grad; use register_hook, which is given the gradient of each "
            "micro-batch, or read engine.named_gradients() before opt.step()"
        )
    hooks = parameter._backward_hooks
    if not hooks:
        return
    if any(getattr(hook, "__module__", None) == "torch.autograd.graph" for hook in hooks.values()):
        raise ModelError(
            f"parameter {name} has a hook of register_multi_grad_hook, but blocks of a streamed model have "
            "their gradients one after the other; use register_hook"
        )
    if is_shared:
        raise ModelError(
            f"parameter {name} has a hook (register_hook), but ranks share out rows (parallel.sequence), so "
            "none has the gradient of a micro-batch; use parallel.sequence=1"
        )


def _checked(name: str, grad: Tensor, found: object) -> Tensor:
    """Return what a hook has returned, if it can take the place of the gradient."""
    alike = isinstance(found, Tensor) and (found.shape, found.dtype, found.device) == (
        grad.shape,
        grad.dtype,
        grad.device,
    )
    if not alike:
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"tensor {tuple(found.shape)} of {found.dtype} on {found.device}"
        raise ModelError(
            f"a hook of parameter {name} has returned a {what}; return one of {tuple(grad.shape)} of "
            f"{grad.dtype} on {grad.device}, where the gradient is, or None"
        )
    assert isinstance(found, Tensor)
    return found
