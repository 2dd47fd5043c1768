"""A norm that passes with the module behind it, and by itself where somebody has hooked one of the two.

A hook sees what its module is called with and what it returns, and may change either: of a norm that passes
inside of another module's tiles, both are the rows that it has not seen yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.model.watched import is_watched

_CAPTURING = "transformers.utils.output_capturing"
"""The hooks of this module stay where somebody has once asked for attentions, and read outputs alone."""


class Joined:
    """A norm, and the module that alone reads what it returns."""

    def __init__(self, norm: nn.Module, module: nn.Module) -> None:
        """Join them for as long as nobody hooks either."""
        self._norm, self._module = norm, module
        self._are_apart = False

    @property
    def are_apart(self) -> bool:
        """Whether each passes by itself from now on: a layer that runs again goes the way that it went."""
        if not self._are_apart and torch._C._current_graph_task_id() == -1:
            self._are_apart = is_watched(self._norm) or _is_watched_before_its_output(self._module)
        return self._are_apart


@dataclass(eq=False)
class Either:
    """Stands for the forward of one of the two."""

    joined: Joined
    together: Callable[..., Any]
    apart: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module."""
        return (self.apart if self.joined.are_apart else self.together)(*args, **kwargs)


def _is_watched_before_its_output(module: nn.Module) -> bool:
    hooks = module._forward_hooks
    if not hooks or any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks.values()):
        return is_watched(module)
    return bool(module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
