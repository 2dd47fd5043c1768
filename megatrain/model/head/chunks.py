"""The loss of a head in chunks of tokens, as one node of autograd with gradients of its own making.

Each chunk runs the model's own code once more on leaves: a part of the hidden states, and weights that share
memory with the head's. Its gradients are asked for at once, the logits are dropped, and the gradients of
weights add up over the chunks in fp32: in the sums of the step, where these are the head's alone and the loss
counts as it is; else they leave the node rounded to the weight's dtype, once per micro-batch, as those of a
head that runs whole do.

Where the backward of a micro-batch follows its forward, and the loss is one number, the gradients are made
in the forward: three products of the size of the logits, where running a chunk again takes four. What comes
back to the node is the factor by which the loss counts, and multiplies them then. Elsewhere chunks run again
in the backward, where the factor is known: of several sums there is one for each, and what waits for a late
backward would take the weights' size in fp32 for every micro-batch.

A norm before the head may run with its chunks. Its backward comes when that of the node does, so that the
gradient is multiplied, and the norm's own backward computed, as where the norm is a node by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatrain.model.head.linear import LinearHead


class HeadWeights(Protocol):
    """The weights with which head and loss of one micro-batch compute."""

    @property
    def is_followed(self) -> bool:
        """Whether the micro-batch's backward of the head comes before anybody else's forward of it."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The weights that want a gradient; autograd goes on from them."""

    def begin_backward(self) -> None:
        """Take note that autograd has come to the head."""

    def sums(self) -> AbstractContextManager[Sequence[Tensor | None]]:
        """Let gradients of a loss that counts as it is be added to sums of the step, in the forward.

        The context returns for each of `tensors` the fp32 sum, in which there is something already; None: its
        gradient leaves the node. Leaves are asked for inside of it.
        """

    def leaves(self) -> AbstractContextManager[Sequence[Tensor]]:
        """Let the model find leaves in place of its weights, and return those of `tensors`, in order.

        In a backward, what torch keeps for a thread is as it was when the head ran forwards.
        """


class ChunkNorm(Protocol):
    """A norm that tokens pass with their chunk: the hidden states are those before it."""

    @property
    def weights(self) -> Sequence[Tensor]:
        """Its weights; autograd goes on from them."""

    def part(self, rows: Tensor) -> Tensor:
        """Compute the norm of some tokens, without a graph: (rows, tokens, width)."""

    def go_back(
        self, hidden: Tensor, gradient: Tensor, weights: Sequence[Tensor], wants: Sequence[bool]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return the gradients of hidden states and of weights from that of what all tokens gave.

        Each is None if `wants` says that it is not wanted. `gradient` may be written over.
        """


_PIECE_NUMEL = 1 << 24
"""Elements of a gradient that are rounded at a time."""

LossOf: TypeAlias = Callable[[Tensor, Tensor, Sequence[Tensor] | None], Tensor]
"""The loss of hidden states (1, T, H) with targets (1, T), and with other tensors in the first chunk only."""


class Chunks:
    """The hidden states of one micro-batch, which pass the head in chunks."""

    def __init__(
        self,
        loss_of: LossOf,
        weights: HeadWeights,
        hidden: Tensor,
        targets: Tensor,
        *,
        others: Sequence[Tensor] | None = None,
        chunk_tokens: int,
        linear: LinearHead | None = None,
        total: int | Tensor = 1,
        ends: Sequence[int] = (),
        norm: ChunkNorm | None = None,
    ) -> None:
        """Prepare to pass them.

        Args:
            loss_of: The loss of a chunk.
            weights: The weights of the head.
            hidden: (G, T, H), the hidden states in groups, each with a sum of its own.
            targets: (G, T) int64, the labels.
            others: The other tensors from which the loss leads on, which the first chunk is given; None:
                there are none.
            chunk_tokens: Tokens per chunk.
            linear: What computes losses and gradients in place of `loss_of`; None: nothing does.
            total: The number by which it divides sums over tokens.
            ends: The tokens of the only group at which a chunk ends in any case, the last one included; what
                `others` lead to is then a chunk without tokens, before all others.
            norm: What chunks pass first; None: nothing.
        """
        self._loss_of = loss_of
        self.weights = weights
        self._hidden: Tensor | None = hidden.detach()
        self.norm = norm
        of_norm = [] if norm is None else norm.weights
        self._wants_hidden = any(tensor.requires_grad for tensor in (hidden, *of_norm))
        self._targets = targets
        self._others = None if others is None else [tensor.detach() for tensor in others]
        self._chunk_tokens = chunk_tokens
        self._linear, self._total = linear, total
        self._inputs = (hidden, *of_norm, *(others or ()), *weights.tensors)
        self._ends = ends
        self.parts: list[tuple[int, Tensor]] = []
        """With `ends`: the losses of chunks with tokens, each with the number of its first one."""
        self.is_one = targets.shape[0] == 1
        """There is one sum."""
        self.runs_again = False
        """Chunks run again in the backward."""

    def losses(self) -> Tensor:
        """Return the (G,) sums of the groups, each over its chunks."""
        inputs, self._inputs = self._inputs, ()  # the graph holds them from now on
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
            return self._values()
        # of several sums each has its factor, and other tensors wait for the end of the round
        self.runs_again = not (self.weights.is_followed and self._others is None and self.is_one)
        losses: Tensor = _Chunks.apply(self, *inputs)
        return losses

    def _spans(self) -> Iterator[tuple[int, slice]]:
        if self._ends:
            if self._others is not None:
                yield 0, slice(0, 0)
            for begin, end in pairwise((0, *self._ends)):
                for start in range(begin, end, self._chunk_tokens):
                    yield 0, slice(start, min(start + self._chunk_tokens, end))
            return
        for group in range(self._targets.shape[0]):
            for start in range(0, max(1, self._targets.shape[1]), self._chunk_tokens):
                yield group, slice(start, start + self._chunk_tokens)

    @contextmanager
    def holding(self, hidden: Tensor) -> Iterator[None]:
        """Run chunks of these hidden states within the context, and let go of them in the end."""
        self._hidden = hidden
        try:
            yield
        finally:
            self._hidden = None

    def _part(self, group: int, span: slice) -> Tensor:
        """Return what the head is given of a chunk: (1, T, H)."""
        assert self._hidden is not None
        part = self._hidden[group : group + 1, span]
        return part if self.norm is None else self.norm.part(part)

    def _run(self, group: int, span: slice) -> tuple[list[Tensor], Tensor]:
        """Run one chunk; return its leaves beside the weights, and its loss.

        The model is given views of them: hooks that watch modules take no leaves in `torch.autograd.grad`.
        """
        part = self._part(group, span).detach().requires_grad_(self._wants_hidden)
        is_first = group == span.start == 0 and not (self._ends and span.stop)
        others = self._others if is_first else None
        if others is not None:
            others = [tensor.detach().requires_grad_() for tensor in others]
        given = None if others is None else [tensor.view_as(tensor) for tensor in others]
        loss = self._loss_of(part.view_as(part), self._targets[group : group + 1, span], given)
        return [part, *(others or ())], loss

    def _values(self) -> Tensor:
        losses: list[list[Tensor]] = [[] for _ in range(self._targets.shape[0])]
        # with a graph where one follows: torch.matmul takes its kernel by whether a tensor wants a gradient
        has_graph = self.runs_again and self._linear is None
        with torch.set_grad_enabled(has_graph), self.weights.leaves():
            for group, span in self._spans():
                if self._linear is None:
                    loss = self._run(group, span)[1].detach()
                else:
                    part = self._part(group, span)[0]
                    loss = self._linear.loss(part, self._targets[group, span], self._total)
                losses[group].append(loss)
                if self._ends and span.stop:
                    self.parts.append((span.start, loss))
        return torch.stack([torch.stack(each).sum() for each in losses])

    def values(self) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sums, and, if they are made in the forward, the gradients of all inputs of the node."""
        if self.runs_again:
            return self._values(), []
        with self.weights.sums() as sums:
            losses, found = self.gradients(None, sums)
        own = len(found) - len(sums)
        left = [grad if held is None else None for held, grad in zip(sums, found[own:], strict=True)]
        return losses, found[:own] + left

    def gradients(
        self, factors: Tensor | None, begun: Sequence[Tensor | None] = ()
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the (G,) sums and the gradients of hidden states, other tensors and weights.

        Args:
            factors: (G,), the gradients of the sums; None: all are 1.
            begun: What the gradients of weights are added to, by weight; empty: nothing.

        Returns:
            The sums; and the gradients, those of weights in fp32, where there are any.
        """
        assert self._hidden is not None
        shape, hidden = self._hidden.shape, None
        others: list[Tensor | None] = [None] * len(self._others or ())
        losses: list[list[Tensor]] = [[] for _ in range(self._targets.shape[0])]
        with self.weights.leaves() as weights:
            sums = list(begun) or [None] * len(weights)
            for group, span in self._spans():
                if self._linear is not None:
                    part = self._part(group, span)
                    loss, of_part = self._linear.gradients(
                        part[0],
                        self._targets[group, span],
                        self._total,
                        None if factors is None else factors[group],
                        weights,
                        sums,
                    )
                    losses[group].append(loss)
                    if self._wants_hidden:
                        hidden = part.new_empty(shape) if hidden is None else hidden
                        hidden[group, span] = of_part
                    continue
                with torch.enable_grad():
                    given, loss = self._run(group, span)
                losses[group].append(loss.detach())
                wants = [tensor for tensor in (*given, *weights) if tensor.requires_grad]
                factor = None if factors is None else factors[group]
                found: Iterator[Tensor | None] = iter([None] * len(wants))
                if loss.requires_grad:
                    found = iter(torch.autograd.grad(loss, wants, factor, allow_unused=True))
                del loss
                if self._wants_hidden:
                    grad = next(found)
                    hidden = given[0].new_empty(shape) if hidden is None else hidden
                    hidden[group : group + 1, span] = 0 if grad is None else grad
                for number in range(len(given) - 1):
                    others[number] = next(found)
                for number, grad in enumerate(found):
                    sums[number] = _added(sums[number], grad)
        return torch.stack([torch.stack(each).sum() for each in losses]), [hidden, *others, *sums]


class _Chunks(torch.autograd.Function):
    """The node: hidden states, the norm's weights, other tensors and weights in, the sums of groups out."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, hidden: Tensor, *inputs: Tensor) -> Tensor:
        ctx.num_norm = 0 if chunks.norm is None else len(chunks.norm.weights)
        ctx.chunks, ctx.dtypes = chunks, [tensor.dtype for tensor in inputs[ctx.num_norm :]]
        if chunks.runs_again or chunks.norm is not None:
            ctx.save_for_backward(hidden, *inputs[: ctx.num_norm])  # autograd lets go of it in the backward
        ctx.set_materialize_grads(False)
        with chunks.holding(hidden.detach()):
            losses, ctx.found = chunks.values()
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor | None) -> tuple[Tensor | None, ...]:
        if factors is None:
            return (None,) * (2 + ctx.num_norm + len(ctx.dtypes))
        chunks: Chunks = ctx.chunks
        saved = ctx.saved_tensors
        chunks.weights.begin_backward()
        found, ctx.found = ctx.found, []
        factor = factors[0] if chunks.is_one else None  # it comes last wherever gradients are made
        if chunks.runs_again:
            with chunks.holding(saved[0]):
                found = chunks.gradients(None if chunks.is_one else factors)[1]
        of_hidden, *others = found
        del found
        if of_hidden is not None:
            of_hidden = _scaled(of_hidden, of_hidden.dtype, factor)
        of_weights: Sequence[Tensor | None] = [None] * ctx.num_norm
        if chunks.norm is not None and of_hidden is not None:
            wants = ctx.needs_input_grad[1 : 2 + ctx.num_norm]
            of_hidden, of_weights = chunks.norm.go_back(saved[0], of_hidden, saved[1:], wants)
        others = [_scaled(*each, factor) for each in zip(others, ctx.dtypes, strict=True)]
        return (None, of_hidden, *of_weights, *others)


def _added(held: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Add a chunk's gradient of a weight to those before, in fp32."""
    if grad is None:
        return held
    return grad.to(torch.float32, copy=True) if held is None else held.add_(grad)


def _scaled(held: Tensor | None, dtype: torch.dtype, factor: Tensor | None) -> Tensor | None:
    """Multiply a gradient by a factor, and round it into the memory in which it is."""
    if held is None:
        return None
    if held.dtype == dtype:
        return held if factor is None else held.mul_(factor)
    assert held.dtype == torch.float32
    flat = held.flatten()
    rounded = flat.view(dtype)[: len(flat)]
    for start in range(0, len(flat), _PIECE_NUMEL):  # what a piece overwrites was read before
        span = slice(start, start + _PIECE_NUMEL)
        piece = flat[span] if factor is None else flat[span] * factor
        rounded[span] = piece.to(dtype)
    return rounded.view(held.shape)
