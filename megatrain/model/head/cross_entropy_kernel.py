"""Cross-entropy of logits and its gradient in their place, as one Triton kernel: each logit is read twice.

Importing this module imports Triton. None of it has ever run on a GPU.
"""

# No postponed annotations: Triton reads those of constants.

import triton
import triton.language as tl


@triton.jit
def _logits(values, scale, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return in fp32 what a model makes of its linear layer's results."""
    logits = values.to(tl.float32) * scale
    if HAS_CAP:
        logits = (2.0 * tl.sigmoid(2.0 * (logits / cap)) - 1.0) * cap
    return logits


@triton.jit
def cross_entropy(  # type: ignore[no-untyped-def]
    results,
    targets,
    losses,
    factor,
    vocab_size,
    scale,
    cap,
    IGNORED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the loss of a row of results, and the gradient of all results in their place.

    Each program takes one row. `factor` holds the number by which all losses count. The loss of a target that
    is no token is NaN, and so are its gradients.
    """
    row = tl.program_id(0).to(tl.int64)
    results += row * vocab_size
    target = tl.load(targets + row)
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(
                results + columns, tl.zeros([BLOCK], results.dtype.element_ty), mask=columns < vocab_size
            )
        return
    is_token = (target >= 0) & (target < vocab_size)
    # before the reductions, which all threads wait for: afterwards gradients are written in its place
    own = _logits(tl.load(results + target, mask=is_token, other=0.0), scale, cap, HAS_CAP)
    top, total = float("-inf"), 0.0
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab_size
        logits = _logits(tl.load(results + columns, mask=inside, other=0.0), scale, cap, HAS_CAP)
        logits = tl.where(inside, logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)  # of logits that are all -inf nothing adds up
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base), axis=0)
        top = new
    log_sum = top + tl.log(total)
    tl.store(losses + row, tl.where(is_token, log_sum - own, float("nan")))
    weight = tl.where(is_token, tl.load(factor) * scale, float("nan"))
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab_size
        logits = _logits(tl.load(results + columns, mask=inside, other=0.0), scale, cap, HAS_CAP)
        gradient = tl.exp(logits - log_sum)
        gradient = tl.where(columns == target, gradient - 1.0, gradient) * weight
        if HAS_CAP:
            gradient = gradient * (1.0 - (logits / cap) * (logits / cap))
        tl.store(results + columns, gradient.to(results.dtype.element_ty), mask=inside)
