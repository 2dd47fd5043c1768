"""The time of attention whose result is the same in every run: that form of FlashAttention-2.

Its backward adds the gradient of the queries up from all blocks of keys. In the deterministic form the blocks
that run at a time each have a copy of that gradient, which are added up at the end: only as many run per head
as fill the device once, and the last of them may leave a part of it idle.

Source: flash_api.cpp and flash_bwd_launch_template.h of FlashAttention 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatrain.hardware import HardwareSpec

_DTYPE = "bf16"
"""FlashAttention-2 computes in; what other kernels lose is not known."""


def copies_of_gradient(multiprocessors: int, heads: int) -> int:
    """Return how many copies of the queries' gradient there are in fp32; `heads` are those of all rows."""
    return -(-multiprocessors // heads)


def filled_share(multiprocessors: int, heads: int) -> float:
    """Return the part of the multiprocessors that the backward fills; `heads` are those of all rows."""
    blocks = heads * copies_of_gradient(multiprocessors, heads)
    return blocks / (multiprocessors * -(-blocks // multiprocessors))


def deterministic_spec(spec: HardwareSpec, heads: int) -> HardwareSpec:
    """Return a machine with the attention of a deterministic run, where its cost is known; else the machine.

    Args:
        spec: The machine.
        heads: The number of query heads of all rows of a micro-batch; 0: it is not known.
    """
    if not is_priced(spec, heads):
        return spec
    assert spec.multiprocessors is not None
    share = spec.flash2_share * filled_share(spec.multiprocessors, heads)
    backward = spec.attention_backward_flops_per_s or spec.attention_flops_per_s
    return replace(
        spec,
        attention_flops_per_s=_slower(spec.attention_flops_per_s, spec.flash2_share),
        attention_backward_flops_per_s=_slower(backward, share),
    )


def is_priced(spec: HardwareSpec, heads: int) -> bool:
    """Return whether the cost of attention in a deterministic run is known."""
    return spec.multiprocessors is not None and heads > 0


def _slower(rates: Mapping[str, float], share: float) -> dict[str, float]:
    return {key: rate * (share if key.startswith(_DTYPE) else 1.0) for key, rate in rates.items()}
