"""Whether somebody has hooked a module, and wants it to be called as it is."""

from __future__ import annotations

from torch import nn


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has hooked a module, or all modules, and wants it to be called as it is."""
    forward = module._forward_hooks or module._forward_pre_hooks
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(forward or backward) or bool(nn.modules.module._has_any_global_hook())
