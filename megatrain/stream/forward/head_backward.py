"""The backward of head and loss: each micro-batch's ends before the head of the next one begins.

Between the last layer and the head a pass goes through a `Cut`. When a call of a step has returned its loss,
autograd goes from there to the cut, and no further: the head's weights have their gradients, and what is left
of the micro-batch is the gradient of its hidden states. So a round takes the memory of one head, whatever the
number of its micro-batches. The backward of the layers begins when all have passed, at the roots of the cuts.

That is possible where nothing else leads from the loss to the layers. A loss that reaches them by another way
(routers' losses, hidden states of earlier layers, a second pass) keeps its graph until the end. Autograd
takes nodes by their sequence numbers, the highest first; of such a loss these are set so that the heads'
gradients add up in the order of micro-batches all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from megatrain.stream.forward.stream_weights import HEAD_ANCHOR

_LATER = 1 << 40
"""More nodes than a process makes."""


class _Cut(torch.autograd.Function):
    """Hands hidden states and weights on; its backward takes what was found before, if anything was."""

    @staticmethod
    def forward(ctx: Any, found: list[Tensor | None], hidden: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.found = found
        ctx.set_materialize_grads(False)
        return (hidden.new_zeros(()), hidden.detach(), *map(Tensor.detach, weights))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, []
        return (None, *(found or grads))


class _Same(torch.autograd.Function):
    """Hands a tensor on: hooks of a model on it are none of the tensor before, where a backward ends."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


class Cut:
    """Where the head of one pass begins."""

    def __init__(self) -> None:
        """Let nodes that are made from now on be the head's."""
        with torch.enable_grad():
            node = HEAD_ANCHOR.view_as(HEAD_ANCHOR).grad_fn
        assert node is not None
        self.oldest = node._sequence_nr()
        """The sequence number of a node that is as old as this."""
        self._found: list[Tensor | None] = []
        self._root: Tensor | None = None
        self._edges: list[Any] = []

    def through(self, hidden: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states and weights for the head to go on with.

        Args:
            hidden: The last layer's output, which wants a gradient.
            weights: The weights of blocks that the head uses and others may use too, such as a tied
                embedding: what the head adds to their gradients waits for the rest.
        """
        self._root, hidden, *weights = _Cut.apply(self._found, hidden, *weights)
        self._edges = [get_gradient_edge(tensor) for tensor in (hidden, *weights)]
        hidden = _Same.apply(hidden)
        return hidden, list(weights)

    def go_back(self, loss: Tensor) -> Tensor | None:
        """Run the backward from `loss` to here, and return where that of the layers begins.

        None: the loss reaches the layers by another way too, or not at all.
        """
        if self._root is None or not self._is_the_only_way(loss):
            return None
        anchor = get_gradient_edge(HEAD_ANCHOR)  # of the head's own weights, whose gradients end with them
        *found, _ = torch.autograd.grad(loss, [*self._edges, anchor], allow_unused=True)
        self._found += found
        return self._root

    def _is_the_only_way(self, loss: Tensor) -> bool:
        """Whether a loss depends on this and on weights of the head alone."""
        end, anchor = self._edges[0].node, get_gradient_edge(HEAD_ANCHOR).node
        nodes = set(_nodes(loss, self.oldest, end))
        return end in nodes and all(
            node is end or node is anchor or (node.next_functions and node._sequence_nr() > self.oldest)
            for node in nodes
        )


class HeadBackward:
    """The backward of the heads of a round's micro-batches, which take turns."""

    def __init__(self) -> None:
        """Begin with any round."""
        self.is_put_off = False
        """That of the last micro-batch could not run by itself, nor can those after it in the round."""

    def begin(self, loss: Tensor, cuts: Sequence[Cut], place: int, num_later: int) -> Tensor:
        """Run that of one micro-batch's head, if it can run by itself; return where the rest begins.

        Where it cannot, those after it in the round are put off too: their gradients come after its own.

        Args:
            loss: The loss of the micro-batch.
            cuts: The cuts of the passes with gradients that the micro-batch has made.
            place: The place of the micro-batch in the round.
            num_later: Micro-batches whose turns come later.
        """
        self.is_put_off = self.is_put_off and place > 0
        root = cuts[0].go_back(loss) if len(cuts) == 1 and not self.is_put_off else None
        if root is not None:
            return root
        self.is_put_off = True
        if cuts:
            _put_before(loss, num_later, oldest=max(cut.oldest for cut in cuts))
        return loss


def _put_before(loss: Tensor, num_later: int, *, oldest: int) -> None:
    """Let autograd take the nodes of a head before those of so many micro-batches that come later."""
    for node in _nodes(loss, oldest):
        number = node._sequence_nr()
        if oldest < number < _LATER:  # a leaf's is larger, and was not given in turn
            node._set_sequence_nr(number + num_later * _LATER)  # type: ignore[attr-defined]


def _nodes(loss: Tensor, oldest: int, end: Node | None = None) -> Iterator[Node]:
    """Yield nodes that are reached from a loss, but none behind `end`, or one that is as old as `oldest`."""
    seen: set[Node] = set()
    waiting: list[Node | None] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node is not end and node._sequence_nr() > oldest:
            waiting += [following for following, _ in node.next_functions]
