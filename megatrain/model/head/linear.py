"""Loss and gradients of a linear head with cross-entropy, without autograd: three products of its size.

The gradient of the logits takes their place, in the dtype in which the layer computes; exponentials and sums
are in fp32. So a chunk holds each logit once, and one piece of them in fp32. The gradient of the weight adds
up over chunks in fp32, some rows of the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from megatrain.hardware.accelerators import launching_on, why_no_kernel
from megatrain.model.head.form import Form
from megatrain.model.shares import IGNORED
from megatrain.model.watched import is_watched

_PIECE_NUMEL = 1 << 23
"""Logits that are in fp32 at a time where torch's operations compute: what they pass on stays in a cache."""

_PRODUCT_NUMEL = 1 << 26
"""Elements of the weight's gradient that a product makes at a time."""

_BLOCK = 1 << 14
"""Logits of a row that a program of the kernel takes at a time."""

_WARPS = 16
"""Warps of a program: 32 logits of a block for each thread, which fit into its registers."""


class LinearHead:
    """A linear layer and the form of what follows it."""

    def __init__(self, linear: nn.Linear, form: Form) -> None:
        """Take the layer of a model, whose parameters are looked up whenever it computes."""
        self.linear = linear
        self.form = form

    @property
    def is_watched(self) -> bool:
        """Whether somebody has hooked the layer, or all modules, and wants it to be called."""
        return is_watched(self.linear)

    def loss(self, hidden: Tensor, targets: Tensor, total: int | Tensor) -> Tensor:
        """Return the sum over tokens of a chunk, divided by `total`; see `gradients`."""
        one = torch.ones((), device=hidden.device)
        return self.enter_gradients(self._results(hidden), targets, one) / total

    def gradients(
        self,
        hidden: Tensor,
        targets: Tensor,
        total: int | Tensor,
        factor: Tensor | None,
        leaves: Sequence[Tensor],
        sums: list[Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Compute loss and gradients of a chunk.

        Args:
            hidden: (T, H), the hidden states.
            targets: (T,) int64, the labels.
            total: The number by which the sum over tokens is divided.
            factor: The gradient of the loss; None: 1.
            leaves: The weights that want a gradient, of which some are the layer's.
            sums: Their gradients so far in fp32, to which those of the chunk are added; None: none.

        Returns:
            The loss of the chunk, which is not multiplied by the factor, and the gradient of `hidden`.
        """
        weight, bias = self.linear.weight, self.linear.bias
        hidden = hidden.to(weight.dtype)
        logits = self._results(hidden)
        scaled = torch.ones((), device=hidden.device) if factor is None else factor.float()
        loss = self.enter_gradients(logits, targets, scaled / total) / total
        for number, leaf in enumerate(leaves):
            if leaf is bias:
                held, found = sums[number], logits.sum(0, dtype=torch.float32)
                sums[number] = found if held is None else held.add_(found)
            elif leaf is weight:
                sums[number] = _add_product(sums[number], logits, hidden)
        return loss, logits @ weight

    def enter_gradients(self, logits: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        """Write the gradients of a linear layer's results in their place; return the sum of the losses.

        Args:
            logits: (T, V), the results.
            targets: (T,) int64, the labels.
            factor: The 0-dim fp32 number by which the loss of a token counts.
        """
        if runs_kernel(logits.device):
            return _enter_by_kernel(logits, targets, factor, self.form).sum()
        losses = [self._enter_piece(*piece, factor) for piece in self._pieces(logits, targets)]
        return torch.cat(losses).sum()

    def _results(self, hidden: Tensor) -> Tensor:
        weight = self.linear.weight
        return nn.functional.linear(hidden.to(weight.dtype), weight, self.linear.bias)

    def _pieces(self, rows: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = max(1, _PIECE_NUMEL // rows.shape[1])
        yield from zip(rows.split(size), targets.split(size), strict=True)

    def _enter_piece(self, results: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        """Write the gradients of some rows, and return their losses."""
        form = self.form
        logits = form.of(results)
        slope = None if form.cap is None else 1 - (logits / form.cap).square()
        is_trained = targets != IGNORED
        index = torch.where(is_trained, targets, 0)[:, None]
        own = logits.gather(1, index)
        top = logits.amax(1, keepdim=True)
        gradients = logits.sub_(top).exp_()
        total = gradients.sum(1, keepdim=True)
        gradients.div_(total)
        gradients.scatter_(1, index, gradients.gather(1, index) - 1)  # adding has no deterministic form
        gradients.mul_(torch.where(is_trained, factor * form.scale, 0)[:, None])
        if slope is not None:
            gradients.mul_(slope)
        if gradients is not results:
            results.copy_(gradients)
        return torch.where(is_trained, (top + total.log() - own)[:, 0], 0)


def _add_product(held: Tensor | None, gradient: Tensor, hidden: Tensor) -> Tensor:
    """Add the gradient of the weight, (V, H), to what is held in fp32, some rows at a time."""
    vocab_size, width = gradient.shape[1], hidden.shape[1]
    is_first = held is None
    if held is None:
        held = torch.empty((vocab_size, width), dtype=torch.float32, device=hidden.device)
    size = max(1, _PRODUCT_NUMEL // width)
    for rows, columns in zip(held.split(size), gradient.split(size, dim=1), strict=True):
        product = columns.T @ hidden
        if is_first:
            rows.copy_(product)
        else:
            rows.add_(product)
    return held


def runs_kernel(device: torch.device) -> bool:
    """Return whether the kernel computes cross-entropy on a device; else torch's operations do.

    The first call for a kind of device tries the kernel there. One that fails, or is far from torch's
    operations, is not used, and a warning says so once.
    """
    return device.type != "cpu" and why_not_fused(device.type) is None


@cache
def why_not_fused(kind: str) -> str | None:
    """Return why torch's operations compute cross-entropy on a kind of device; None: the kernel does."""

    def try_it(device: torch.device) -> str:
        difference = try_kernel(device)
        return "" if difference <= 1e-5 else f"is wrong by {difference:.1e}"

    return why_no_kernel(kind, try_it, "cross-entropy is computed by torch's operations")


def try_kernel(device: torch.device) -> float:
    """Return the largest difference between the kernel and torch's operations, of a few rows.

    Their length is a multiple of 16 or not, which Triton compiles differently. In bf16 a unit in the last
    place of a gradient counts little enough.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for form, more, dtype in (
        (Form(), 100, torch.float32),
        (Form(scale=0.5), 112, torch.float32),
        (Form(cap=3.0), 112, torch.float32),
        (Form(), 112, torch.bfloat16),
    ):
        size, unit = 2 * _BLOCK + more, 1.0 if dtype == torch.float32 else 1 / 400
        values = torch.randn((3, size), generator=generator).to(device, dtype)
        targets = torch.tensor([7, IGNORED, size - 1]).to(device)
        factor = torch.full((), 0.25).to(device)
        expected = values.clone()
        losses = LinearHead(nn.Linear(1, 1), form)._enter_piece(expected, targets, factor)
        found = _enter_by_kernel(values, targets, factor, form)
        worst = max(worst, float((found - losses).abs().max()) * unit)
        worst = max(worst, float((values.float() - expected.float()).abs().max()) * unit)
    return worst


def _enter_by_kernel(logits: Tensor, targets: Tensor, factor: Tensor, form: Form) -> Tensor:
    from megatrain.model.head import cross_entropy_kernel

    losses = torch.empty(len(targets), device=logits.device)
    if not len(targets):
        return losses
    with launching_on(logits.device):
        cross_entropy_kernel.cross_entropy[(len(targets),)](
            logits,
            targets,
            losses,
            factor,
            logits.shape[1],
            float(form.scale),
            float(form.cap or 1.0),
            IGNORED=IGNORED,
            HAS_CAP=form.cap is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return losses
