"""Head and loss by themselves: the model's own operations, `LinearHead`, and Liger's fused function.

All make the loss of the same tokens and the gradients of hidden states and weight, with the same chunks where
they have any. Errors are against the model's own operations in fp32, as parts of the largest gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.run import Record, best_s, device_of, synchronize

TOKENS, WIDTH, VOCAB_SIZE = 8192, 4096, 128_256
DRY = 96, 64, 512
TOLERANCE = 2e-2

Made = tuple[Any, Any, Any]
"""The loss, and the gradients of hidden states and weight."""


def head(record: Record, is_dry: bool) -> None:
    """Time each way, and say what memory it takes and how far its gradients are from those in fp32."""
    import torch

    from megatrain.model.head.head import LOGITS_BYTES
    from megatrain.model.head.linear import runs_kernel, why_not_fused

    device = device_of(is_dry)
    tokens, width, vocab_size = DRY if is_dry else (TOKENS, WIDTH, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((tokens, width), generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn((vocab_size, width), generator=generator) / width**0.5).to(device, torch.bfloat16)
    targets = torch.randint(vocab_size, (tokens,), generator=generator).to(device)
    chunk = max(1, min(tokens // 3, LOGITS_BYTES // (4 * vocab_size)))
    record.add(
        tokens=tokens,
        width=width,
        vocab_size=vocab_size,
        chunk_tokens=chunk,
        kernel="Triton" if runs_kernel(device) else why_not_fused(device.type) if not is_dry else "none",
    )
    ways: dict[str, Callable[[], Made]] = {
        "own": lambda: of_autograd(hidden, weight, targets, chunk),
        "linear": lambda: of_linear(hidden, weight, targets, chunk),
    }
    if importlib.util.find_spec("liger_kernel") is not None and device.type == "cuda":
        ways["liger"] = lambda: of_liger(hidden, weight, targets)
    exact = of_autograd(hidden.float(), weight.float(), targets, chunk)
    products = 3 * 2.0 * tokens * width * vocab_size
    for name, run in ways.items():
        found = run()
        errors = [
            float((one.float() - other.float()).abs().max() / other.float().abs().max())
            for one, other in zip(found, exact, strict=True)
        ]
        del found
        row: dict[str, Any] = {"way": name, "errors": errors, "is_ok": max(errors) <= TOLERANCE}
        if device.type == "cuda":
            synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run()
            row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        seconds = best_s(device, run, repeats=3)
        record.append("ways", {**row, "seconds": seconds, "flops_of_three_products": products / seconds})
    failures = [row["way"] for row in record.values["ways"] if not row["is_ok"]]
    assert not failures, f"gradients of {', '.join(failures)} are far from those in fp32"


def of_autograd(hidden: Any, weight: Any, targets: Any, chunk: int) -> Made:
    """Return what transformers' operations give, each chunk run again in the backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]

    def loss_of(part: Any, wanted: Any) -> Any:
        logits = torch.nn.functional.linear(part, leaves[1]).float()
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / len(targets)

    parts = zip(leaves[0].split(chunk), targets.split(chunk), strict=True)
    loss = torch.stack([checkpoint(loss_of, *part, use_reentrant=False) for part in parts]).sum()
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def of_linear(hidden: Any, weight: Any, targets: Any, chunk: int) -> Made:
    """Return what `LinearHead` gives."""
    import torch

    from megatrain.model.head.form import Form
    from megatrain.model.head.linear import LinearHead

    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(weight)
    linear = LinearHead(layer, Form())
    sums: list[Any] = [None]
    losses, grads = [], torch.empty_like(hidden)
    with torch.no_grad():
        for start in range(0, len(hidden), chunk):
            span = slice(start, start + chunk)
            loss, grads[span] = linear.gradients(
                hidden[span], targets[span], len(targets), None, [layer.weight], sums
            )
            losses.append(loss)
    return torch.stack(losses).sum(), grads, sums[0]


def of_liger(hidden: Any, weight: Any, targets: Any) -> Made:
    """Return what Liger's function gives, with its own chunks and sums in fp32."""
    import torch
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    found = LigerFusedLinearCrossEntropyFunction.apply(
        *leaves, targets, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32
    )
    loss = found[0] if isinstance(found, tuple) else found
    return (loss.detach(), *torch.autograd.grad(loss, leaves))
