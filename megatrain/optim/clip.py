"""Clip gradients by their global norm, with the arithmetic of `torch.nn.utils.clip_grad_norm_`.

The coefficient is not applied here: the update multiplies each gradient by it as it reads it, so clipping
costs no pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megatrain.errors import ConfigError


def check_max_norm(max_grad_norm: float | None) -> None:
    """Refuse a norm to which nothing can be clipped.

    Raises:
        ConfigError: The norm is no positive number.
    """
    if max_grad_norm is not None and not 0.0 < max_grad_norm < math.inf:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; use a positive number, or None for no clipping")


def global_norm(sums: Iterable[float]) -> float:
    """Return the norm of all gradients together.

    Args:
        sums: The sum of squares of each part; the result does not depend on their order.

    Returns:
        The square root of the sum of all, rounded to a float32 value; inf or nan if a part is.
    """
    parts = list(sums)
    if not all(map(math.isfinite, parts)):
        return math.sqrt(sum(parts))
    return torch.tensor(math.sqrt(math.fsum(parts)), dtype=torch.float32).item()


def clip_coefficient(grad_norm: float, max_grad_norm: float | None) -> float:
    """Return the factor that clips gradients of norm `grad_norm` to `max_grad_norm`.

    Args:
        grad_norm: The norm of all gradients, a float32 value, as `global_norm` returns it.
        max_grad_norm: The largest norm that stays as it is; None: do not clip.

    Returns:
        A float32 value of at most 1: what `torch.nn.utils.clip_grads_with_norm_` multiplies gradients by. nan
        if the norm is nan.
    """
    if max_grad_norm is None:
        return 1.0
    norm = torch.tensor(grad_norm, dtype=torch.float32)
    return torch.clamp(float(max_grad_norm) / (norm + 1e-6), max=1.0).item()
