"""Work of a pass, counted on fake tensors: FLOPs, bytes and kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from megatrain.config.policies import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work of one pass of one micro-batch."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    """Causal attention at half; by tiles, all that they compute."""
    moved_bytes: float = 0.0
    """Device memory that all other operations read and write, each by itself."""
    num_operations: int = 0
    """Kernels launched, each operation by itself."""
    fused_bytes: float = 0.0
    """`moved_bytes` where a compiler joins them: `model.profile.fusion`."""
    num_kernels: int = 0
    """`num_operations` there."""
    attention_bytes: float = 0.0
    """Device memory that attention by tiles of torch's own operations reads and writes: its scores."""
    swapped_bytes: float = 0.0
    """Bytes given to the ranks that share out the same rows; as many are received from them."""

    def __add__(self, other: Cost) -> Cost:
        """Return the work of both."""
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS})

    def again(self, policy: Policy) -> Cost:
        """Return what of this work, a layer's forward, runs again under an activation policy."""
        if not policy.reruns:
            return Cost()
        return replace(
            self,
            matmul_flops=0.0 if policy.keeps_products else self.matmul_flops,
            attention_flops=0.0 if policy.keeps_attention else self.attention_flops,
            attention_bytes=0.0 if policy.keeps_attention else self.attention_bytes,
        )

    def __sub__(self, other: Cost) -> Cost:
        """Return the work of this one that the other, a part of it, does not hold."""
        return Cost(**{name: getattr(self, name) - getattr(other, name) for name in _NUMBERS})

    def scaled(self, factor: Any) -> Cost:
        """Return this work that many times; a number for each of several sizes gives as many."""
        scaled = {name: getattr(self, name) * factor for name in _NUMBERS}
        return Cost(**scaled | {name: _whole(scaled[name]) for name in ("num_operations", "num_kernels")})


_NUMBERS = tuple(field.name for field in fields(Cost))


def _whole(number: Any) -> Any:
    return round(number) if isinstance(number, int | float) else number.round()
