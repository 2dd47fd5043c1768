"""How much compute a visit of a block is, in FLOPs: for the record, and for lanes that keep to a rate.

Counted as the step's report counts: products of active parameters with all positions, padding too, and causal
attention at half. Of what runs again, results that a policy keeps cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.config.policies import Policy
from megatrain.model.profile.flops import ModelFlops
from megatrain.plan.program.features.roles import BlockPass


class ComputeWork:
    """What a visit of each block computes, for the micro-batch that makes it."""

    def __init__(
        self,
        flops: ModelFlops,
        layers: Sequence[Sequence[tuple[int, int]]],
        policies: Sequence[Policy],
    ) -> None:
        """Count for a model.

        Args:
            flops: The FLOPs of a token in each part of the model.
            layers: The blocks of each decoder layer with their numbers of parameters: a fragment's share of
                the layer's FLOPs is that of its parameters.
            policies: The activation policy of each layer.
        """
        self._flops = flops
        self._policies = list(policies)
        self._place: dict[int, tuple[int, float]] = {}
        for number, blocks in enumerate(layers):
            total = sum(size for _, size in blocks)
            for block, size in blocks:
                self._place[block] = number, size / total if total else 1.0 / len(blocks)
        self._shapes: dict[int, tuple[int, int]] = {}
        self._per_position: dict[tuple[int, int, bool, bool], float] = {}
        self._back: dict[int, float] = {}
        self._rerun_tokens = self._eager_tokens = 0
        self._outer = 0.0

    def begin_pass(self, micro_batch: int, row_tokens: int, positions: int) -> None:
        """Take note of the shape of a micro-batch, by its number within the round."""
        self._shapes[micro_batch] = row_tokens, positions

    def of(self, operation: BlockPass, *, is_again: bool) -> float:
        """Return the FLOPs of a visit; `is_again`: it runs a forward that was run before.

        A backward's visit with a recomputation is both.
        """
        number, share = self._place[operation.block]
        row_tokens, positions = self._shapes.get(operation.visit.micro_batch, (1, 0))
        key = number, row_tokens, operation.is_backward, is_again
        if key not in self._per_position:
            self._per_position[key] = self._count(*key)
        return share * positions * self._per_position[key]

    def _count(self, number: int, row_tokens: int, is_backward: bool, is_again: bool) -> float:
        """Count the FLOPs of a layer's visit, for each position of rows of so many tokens."""
        part = self._flops.layers[number]
        forward = part.forward_flops(row_tokens)
        total = 0.0 if is_backward else forward
        if is_again:
            total = part.rerun_flops(row_tokens, self._policies[number])
        if is_backward:
            total += part.flops(row_tokens) - forward
        return total

    def head_forward(self, micro_batch: int, *, rerun_tokens: int, eager_tokens: int) -> None:
        """Take note that a micro-batch has passed the head.

        Args:
            micro_batch: The number of the micro-batch within the round.
            rerun_tokens: The number of tokens so far that pass the head again in the backward: those that
                came with this micro-batch do.
            eager_tokens: The number of tokens so far whose gradients were made with the loss.
        """
        row_tokens, positions = self._shapes.get(micro_batch, (1, 0))
        rest = self._flops.rest
        forward = positions * rest.forward_flops(row_tokens)
        backward = positions * rest.flops(row_tokens) - forward
        is_eager = eager_tokens > self._eager_tokens
        self._outer += forward + backward * is_eager
        again = (rerun_tokens - self._rerun_tokens) * self._flops.head_flops
        self._back[micro_batch] = 0.0 if is_eager else backward + again
        self._rerun_tokens, self._eager_tokens = rerun_tokens, eager_tokens

    def head_backward(self, micro_batch: int) -> None:
        """Take note that autograd begins to pass a micro-batch's head."""
        self._outer += self._back.pop(micro_batch, 0.0)

    def take_outer(self) -> float:
        """Return what outer blocks have computed since the last call."""
        outer, self._outer = self._outer, 0.0
        return outer
