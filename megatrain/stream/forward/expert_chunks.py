"""How experts run in chunks: all micro-batches of a round pass a chunk before the next one comes.

A call of the experts becomes three kinds of autograd nodes. `_Enter` takes what flows in, `_Chunk` stands for
one chunk, and `_Leave` gives the sum over each token's choices. What flows between them is an empty ticket,
which puts them in order; rows of tokens stay with the call. So a chunk's recomputation and backward follow
each other, and what a token's gradient adds up from is added in the order of the unchunked call: tokens are
sorted by expert, and chunks pass from the last to the first in the forward, so that they go back in order.

A recomputation of the layer runs no chunk: what autograd saves behind the experts does not depend on what
they return, or else that is kept. Where nothing with weights is behind them, what flows into them is kept
too, like the layer's input: so each micro-batch is recomputed when all have gone back through the chunks, one
by one, and what a recomputation saves is there of one at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.model.experts.apart import Experts
from megatrain.model.experts.products import Beside, ChunkRows, Routed, first_product, second_product
from megatrain.model.selective import kept_by_none
from megatrain.model.torch_state import Autocast
from megatrain.stream.forward.stream_weights import ANCHOR


class ChunkVisits(Protocol):
    """Brings the weights of chunks, and takes their gradients."""

    def forward(self, block: int) -> AbstractContextManager[Tensor]:
        """Return a context in which a block's weight is there, and passed for the first time."""

    def again(self, block: int) -> AbstractContextManager[Tensor]:
        """Return one in which a forward runs again; the block stays until its backward."""

    def backward(self, block: int, run: Callable[[Tensor], Tensor | None]) -> None:
        """Visit a block's backward: `run` takes the weight, and returns its gradient if it wants one."""

    def refuse_second_backward(self) -> None:
        """Raise what says that a forward has one backward."""

    def begin_backward(self) -> None:
        """Take note that autograd has come to the experts."""

    def end_backward(self) -> None:
        """Take note that autograd goes on with what was before the experts."""

    def read_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns a small tensor on the host, as it is now."""

    def keep(self, tensor: Tensor) -> object:
        """Keep a tensor until the backward, on the device or where inputs of layers wait."""

    def bring(self, kept: object) -> Tensor:
        """Return a tensor that was kept."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some experts of a layer, and their two blocks."""

    experts: range
    first: int
    """Number of the block with their part of the first matrix."""
    second: int


class ExpertsCall:
    """One call of a layer's experts, from its forward to its backward."""

    def __init__(
        self,
        experts: Experts,
        beside: Beside,
        chunks: Sequence[Chunk],
        visits: ChunkVisits,
        device: torch.device,
        *,
        keeps_input: bool,
        keeps_output: bool,
        is_trained: bool,
    ) -> None:
        """Prepare a call.

        Args:
            experts: The experts.
            beside: What is beside their matrices.
            chunks: Their chunks, in the order of the forward.
            visits: The visits of their blocks.
            device: The device whose autocast the backward has again.
            keeps_input: A claim that what flows in is kept by itself: the layer is recomputed, but not before
                the experts have gone back.
            keeps_output: A claim that a recomputation of the layer needs what the call returned.
            is_trained: A claim that a matrix of the experts is trained.
        """
        self._experts, self._beside, self._chunks, self._visits = experts, beside, chunks, visits
        self._keeps_input, self._keeps_output = keeps_input, keeps_output
        self._input: list[object] = []
        self._wants: list[bool] = []
        self._is_trained = is_trained
        self._goes_back = False
        """Whether autograd comes back to the call: nothing before it may want a gradient."""
        self._autocast = Autocast(device)
        self._bounds: list[range] = []
        """By chunk: its rows among those of the sorted tokens."""
        self._weighted: Tensor | None = None
        """The weighted result of each token and choice, while chunks pass."""
        self._output: Callable[[], Tensor | None] = lambda: None
        """Returns what the call returned, where that is kept."""
        self._back: _Back | None = None

    # -- forward --------------------------------------------------------------------------------------------

    def run(self, given: Routed, small: Sequence[Tensor], give_way: Callable[[float], None]) -> Tensor:
        """Compute the experts of routed tokens, (tokens, width).

        Args:
            given: The tokens, with their experts.
            small: Copies of the weights beside the experts, whose own block leaves the device meanwhile.
            give_way: The function that lets other micro-batches come to a place in the layer, which begins
                at 0 and ends at 1.
        """
        routed = replace(given, extras=tuple(small))
        read = self._visits.read_later(routed.starts(self._experts.number))
        saved: tuple[Tensor, ...] = ()
        self._wants = [tensor.requires_grad for tensor in given.differentiable]
        self._goes_back = torch.is_grad_enabled() and (self._is_trained or any(self._wants))
        if self._goes_back:
            saved = routed.saved
        if saved and self._keeps_input:
            flowing, shared = saved[: -len(small) or None], saved[len(saved) - len(small) :]
            self._input, saved = [*map(self._visits.keep, flowing), *shared], ()
        ticket = _Enter.apply(self, ANCHOR, *given.differentiable) if self._goes_back else None
        num_places = len(self._chunks) + 2
        for number in range(len(self._chunks)):
            give_way((number + 1) / num_places)
            if number == 0:  # all micro-batches have been launched up to here
                starts = read().tolist()
                chunks = (chunk.experts for chunk in self._chunks)
                self._bounds = [range(starts[chunk.start], starts[chunk.stop]) for chunk in chunks]
            if ticket is None:
                self.compute(number, routed)
            else:
                ticket = _Chunk.apply(self, number, routed, ticket)
        give_way((num_places - 1) / num_places)
        if ticket is None:
            return self.take_output(routed)
        found: Tensor = _Leave.apply(self, routed, ticket, *saved)
        return found

    def run_again(self, given: Routed, small: Sequence[Tensor]) -> Tensor:
        """Stand for the call in a recomputation of its layer, which wants what autograd saves."""
        again = _Again(self._output())
        if self.is_done_by_itself:
            return again.take_output(given)
        routed = replace(given, extras=tuple(small))
        ticket = _Enter.apply(None, ANCHOR, *given.differentiable)
        found: Tensor = _Leave.apply(again, routed, ticket, *routed.saved)
        return found

    @property
    def is_done_by_itself(self) -> bool:
        """Whether autograd saves nothing of the call in a recomputation of its layer."""
        return self._keeps_input or not self._goes_back

    def compute(self, number: int, routed: Routed) -> None:
        """Compute the results of a chunk, without gradients."""
        chunk, rows = self._chunks[number], self._bounds[number]
        with kept_by_none(), torch.no_grad():
            part = ChunkRows.of(routed, chunk.experts, rows) if rows else None
            with self._visits.forward(chunk.first) as weight:
                inner = None if part is None else first_product(self._experts, self._beside, part, weight)
            with self._visits.forward(chunk.second) as weight:
                if part is None or inner is None:
                    return
                found = second_product(self._experts, self._beside, part, inner, weight)
            if self._weighted is None:
                self._weighted = found.new_empty(len(routed.places), found.shape[1])
            self._weighted[part.places] = found

    def take_output(self, routed: Routed) -> Tensor:
        """Return the sum over each token's choices, once all chunks have passed."""
        weighted, self._weighted = self._weighted, None
        found = routed.hidden.new_zeros(routed.hidden.shape) if weighted is None else routed.summed(weighted)
        if self._keeps_output:
            kept = found.clone()
            self._output = lambda: kept
        return found

    def hand_over(self) -> tuple[list[object], Tensor | None]:
        """Return what is kept, for autograd to hold: with a forward that is dropped it is gone."""
        kept, output = self._input, self._output()
        self._input = []
        if output is not None:
            self._output = weakref.ref(output)
        return kept, output

    # -- backward -------------------------------------------------------------------------------------------

    def begin_backward(self, saved: Sequence[Tensor], kept: Sequence[object], gradient: Tensor) -> None:
        """Take what autograd has saved or held, and the gradient of what the call returned."""
        if not (saved or kept):
            self._visits.refuse_second_backward()
        self._visits.begin_backward()
        saved = saved or [self._visits.bring(each) for each in kept]
        self._back = _Back(Routed.restored(saved), gradient, self._wants)

    def go_back(self, number: int) -> None:
        """Run a chunk's forward again, and its backward."""
        experts, chunk, rows, back = self._experts, self._chunks[number], self._bounds[number], self._back
        beside, num_first = self._beside, self._beside.num_first
        assert back is not None, "the experts go back before what they returned has a gradient"
        if not rows:
            self._pass(chunk)
            return
        part = back.part(chunk.experts, rows)
        with torch.enable_grad(), self._autocast.again():
            with self._visits.again(chunk.first) as first_weight:
                inner = first_product(experts, beside, part, first_weight)
            leaf = inner.detach().requires_grad_(inner.requires_grad)
            found: list[Tensor | None] = []

            def second(weight: Tensor) -> Tensor | None:
                out = second_product(experts, beside, part, leaf, weight)
                sources = [leaf, weight, part.weights, *part.extras[num_first:]]
                found.extend(_gradients([out], sources, [back.rows_of(part).to(out.dtype)]))
                own, found[1] = found[1], None
                return own

            def first(_: Tensor) -> Tensor | None:
                sources = [part.hidden, first_weight, *part.extras[:num_first]]
                of_first = _gradients([inner], sources, found[:1])
                extras = [*of_first[2:], *found[3:]]
                back.add(part, chunk.experts, [of_first[0], found[2], *extras])
                return of_first[1]

            self._visits.backward(chunk.second, second)
            self._visits.backward(chunk.first, first)

    def _pass(self, chunk: Chunk) -> None:
        """Visit a chunk to which no token was sent."""

        def nothing(weight: Tensor) -> Tensor | None:
            return torch.zeros_like(weight) if weight.requires_grad else None

        with self._visits.again(chunk.first):
            pass
        self._visits.backward(chunk.second, nothing)
        self._visits.backward(chunk.first, nothing)

    def end_backward(self) -> Sequence[Tensor | None]:
        """Return the gradients of what flowed in."""
        back, self._back = self._back, None
        assert back is not None
        self._visits.end_backward()
        return back.gradients


class _Back:
    """What the backward of a call has of it while chunks go back."""

    def __init__(self, routed: Routed, gradient: Tensor, wants: Sequence[bool]) -> None:
        self._routed, self._gradient, self._wants = routed, gradient, wants
        pairs = zip(routed.differentiable, wants, strict=True)
        self.gradients = [torch.zeros_like(tensor) if want else None for tensor, want in pairs]

    def part(self, experts: range, rows: range) -> ChunkRows:
        """Return a chunk's rows, as leaves."""
        return ChunkRows.of(self._routed, experts, rows, wants=self._wants)

    def rows_of(self, part: ChunkRows) -> Tensor:
        """Return the gradient of each row's weighted result."""
        return self._gradient[part.tokens]

    def add(self, part: ChunkRows, experts: range, gradients: Sequence[Tensor | None]) -> None:
        """Add a chunk's gradients to those of what flowed in."""
        hidden, weights, *extras = gradients
        for total, index, gradient in zip(
            self.gradients, (part.tokens, part.places), (hidden, weights), strict=False
        ):
            if total is not None and gradient is not None:
                total.index_put_((index,), gradient, accumulate=True)
        for total, gradient in zip(self.gradients[2:], extras, strict=True):
            if total is not None and gradient is not None:
                total[experts.start : experts.stop] = gradient


class _Again:
    """Stands for a call in a recomputation of its layer."""

    def __init__(self, output: Tensor | None) -> None:
        self._output = output

    def take_output(self, routed: Routed) -> Tensor:
        """Return what the call returned, where that is needed, or anything of its shape."""
        return routed.hidden.new_zeros(routed.hidden.shape) if self._output is None else self._output.clone()

    def hand_over(self) -> tuple[list[object], None]:
        """Return that nothing is kept."""
        return [], None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ExpertsCall | None, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.call = call
        return inputs[0].new_zeros(())  # on the device, so that its thread runs all nodes in one order

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.call.end_backward()


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ExpertsCall, number: int, routed: Routed, ticket: Tensor) -> Tensor:
        ctx.call, ctx.number = call, number
        call.compute(number, routed)
        return ticket.new_zeros(())

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[None, None, None, Tensor]:
        ctx.call.go_back(ctx.number)
        return None, None, None, ticket


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Any, routed: Routed, ticket: Tensor, *saved: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*saved)
        found: Tensor = call.take_output(routed)
        ctx.held = call.hand_over()
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved, (kept, _), ctx.held = ctx.saved_tensors, ctx.held, ([], None)
        ctx.call.begin_backward(saved, kept, gradient)
        return None, None, gradient.new_zeros(()), *(None for _ in saved)


def _gradients(
    outputs: Sequence[Tensor], sources: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradient of each source, and None of one that wants none."""
    wanted = [source for source in sources if source.requires_grad]
    if not wanted or gradients[0] is None:
        return [None] * len(sources)
    found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
    return [next(found) if source.requires_grad else None for source in sources]
