"""Adding gradients in bf16 to sums in fp32, as one Triton kernel: all is read once, and sums written once.

Importing this module imports Triton. None of it has ever run on a GPU.
"""

# No postponed annotations: Triton reads those of constants.

import triton
import triton.language as tl

from megatrain.optim.adamw.fused_kernels import widen


@triton.jit
def add(sums, values, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add `numel` values, the bits of bf16, to fp32 sums in place; each program takes `BLOCK` of them."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < numel
    wide = widen(tl.load(values + places, mask=inside, other=0))
    tl.store(sums + places, tl.load(sums + places, mask=inside, other=0.0) + wide, mask=inside)
