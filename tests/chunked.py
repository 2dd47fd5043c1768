"""The resident reference of a head in chunks: each chunk's gradients by themselves, added up in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.model.head.form import form_of, linear_of
from megatrain.model.head.linear import LinearHead
from tests.reference import Batch, Resident

CHUNK = 11
"""Tokens."""


class InChunks:
    """The loss of a resident model of which the head runs in chunks."""

    def __init__(
        self,
        sums: dict[int, Tensor],
        model: PreTrainedModel,
        batch: Batch,
        total: Tensor,
        _: int,
        *,
        is_fused: bool = False,
        is_plain: bool = True,
    ) -> None:
        """Run the model.

        Args:
            sums: The step's sums of the head's own weights, by their ids. Those of weights that are used
                elsewhere too are rounded in each micro-batch.
            model: The model.
            batch: The micro-batch.
            total: The number by which the loss is divided.
            is_fused: Whether gradients are those of `LinearHead`, not of `torch.autograd.grad`.
            is_plain: Whether the head's own weights add up in `sums`; otherwise they are rounded too.
        """
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].reshape(1, -1)
        given = {name: value for name, value in batch.items() if name != "labels"}
        self._model, self._is_fused = model, is_fused
        self._hidden = model.get_decoder()(**given).last_hidden_state
        self._hidden_grad = torch.empty_like(self._hidden).flatten(0, 1)
        head = model.get_output_embeddings()
        self._weights = list(head.parameters())
        is_tied = head.weight is model.get_input_embeddings().weight or not is_plain
        self._sums = {id(weight): torch.zeros_like(weight, dtype=torch.float32) for weight in self._weights}
        for key, held in self._sums.items():
            if not is_tied:
                self._sums[key] = sums.setdefault(key, held)
        self._is_tied = is_tied
        hidden = self._hidden.detach().flatten(0, 1)[None]
        losses = []
        for start in range(0, labels.shape[1], CHUNK):
            span = slice(start, start + CHUNK)
            loss, self._hidden_grad[span] = self._chunk(hidden[:, span], labels[:, span], total)
            losses.append(loss)
        self._loss = torch.stack(losses).sum()

    def _chunk(self, hidden: Tensor, labels: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        sums = [self._sums[id(weight)] for weight in self._weights]
        if self._is_fused:
            form, layer = form_of(self._model.config), linear_of(self._model)
            assert form is not None
            assert layer is not None
            with torch.no_grad():
                return LinearHead(layer, form).gradients(
                    hidden[0], labels[0], total, None, self._weights, list(sums)
                )
        part = hidden.detach().requires_grad_()
        logits = self._logits(part)
        loss = self._model.loss_function(
            logits, labels, logits.shape[-1], shift_labels=labels, num_items_in_batch=total
        )
        found, *grads = torch.autograd.grad(loss, [part, *self._weights])
        for held, grad in zip(sums, grads, strict=True):
            held += grad
        return loss.detach(), found[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Compute what the families' own forwards do behind their decoders."""
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits / getattr(self._model.config, "logits_scaling", 1.0)

    def detach(self) -> Tensor:
        """Return the loss."""
        return self._loss

    def backward(self) -> None:
        """Give every parameter its gradient, but the head's own."""
        if self._is_tied:
            for weight in self._weights:
                weight.grad = self._sums[id(weight)].to(weight.dtype)
        self._hidden.backward(self._hidden_grad.view_as(self._hidden))


@contextmanager
def heads_in_chunks(
    reference: Resident,
    model: PreTrainedModel,
    where: str = "tests.reference",
    *,
    is_fused: bool = False,
    is_plain: bool = True,
) -> Iterator[None]:
    """Let the head of a resident reference run in chunks.

    Args:
        reference: The reference.
        model: What it computes with.
        where: The module of its `forward_backward`.
        is_fused: As in `InChunks`.
        is_plain: As there.
    """
    run, names = reference.forward_backward, {id(p): name for name, p in model.named_parameters()}

    def forward_backward(batches: Sequence[Batch], seeds: Sequence[int] | None = None) -> Tensor:
        sums: dict[int, Tensor] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                f"{where}.loss_in_step", partial(InChunks, sums, is_fused=is_fused, is_plain=is_plain)
            )
            loss = run(batches, seeds)
        for key, held in sums.items():
            dtype = model.get_parameter(names[key]).dtype
            reference.sums[names[key]] = held.to(dtype).float().cpu()
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "forward_backward", forward_backward)
        yield
