"""The visits of a step: in which order the model and autograd pass the blocks, with which micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TypeVar

from megatrain.config.policies import Policy
from megatrain.config.runs import ONE_RUN, RoundSums

HEAD = -1
"""The number, in place of a block's, of final norm, head and loss, which are passed between the layers."""

ROUND_END = -2
"""The number, in place of a block's, of the exchange of gradients that a round left on the device."""

_Size = TypeVar("_Size")


@dataclass(frozen=True, slots=True)
class Visit:
    """The model, or autograd, passes a block, or the head, with one micro-batch."""

    block: int
    is_backward: bool = False
    micro_batch: int = 0
    adds: bool = False
    """Backward only: micro-batches of the round before it left a gradient to add to."""
    loads: bool = False
    """Backward only: earlier rounds left a gradient to add to."""
    sums_on_host: bool = False
    """Backward only: its gradient leaves by itself, and the host adds it to that of earlier rounds."""
    is_last: bool = True
    """Backward only: no later micro-batch of the round passes the block."""
    completes: bool = True
    """Backward only: after this round the gradient is complete."""
    saves: bool = False
    """Forward only: its activations go to the host."""
    restores: int = -1
    """The block whose activations come back before it; -1: none."""
    is_head: bool = False
    """The visit passes a head that streams: final norm, head and loss."""
    num_micro_batches: int = 1
    """More than one where a plan times several together."""
    stays: bool = False
    """Forward only: saved tensors point into the block, which keeps its slot until it is visited next."""
    sums: RoundSums = ONE_RUN
    """Backward only: what the round does with partial sums."""

    @property
    def needs_sum(self) -> bool:
        """Return whether what earlier rounds left has to be on the device."""
        return self.loads and not self.sums_on_host and len(self.sums.loaded) > 0

    @property
    def adds_up(self) -> bool:
        """Return whether its gradient is a part of a sum of micro-batches, rounds, head parts or ranks."""
        return self.adds or self.loads or self.is_head or self.sums.exchanges

    @property
    def bare(self) -> Visit:
        """Return what can be seen of it from outside: without what it does to gradients and activations."""
        return bare_visit(self.block, self.is_backward, self.micro_batch, stays=self.stays)


@cache
def bare_visit(block: int, is_backward: bool, micro_batch: int, *, stays: bool = False) -> Visit:
    """Return what can be seen of a visit from outside: always the same object, as rounds are compared."""
    return Visit(block, is_backward, micro_batch, stays=stays)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The way in which a decoder layer is passed."""

    blocks: tuple[int, ...]
    """Its fragments in forward order; a layer that streams as a whole is its own one."""
    num_chunks: int = 0
    """The number of chunks of its experts. All micro-batches pass one before the next comes. Each is a pair
    of blocks, one of each matrix, behind the layer's first block; what is behind them runs after them."""
    is_recomputed: bool = True
    saves: bool = False
    """Activations, or the boundary, wait on the host."""
    drops: bool = False
    """The boundary is not kept: the layers before it make it again."""
    saved_bytes: int = 0
    """Bytes that a micro-batch saves to the host, if they are known ahead."""
    room_bytes: int = 0
    """Room that they take there: each tensor begins at an aligned address."""

    @property
    def passes(self) -> tuple[tuple[int, ...], ...]:
        """Return the blocks in the groups that all micro-batches pass one after the other."""
        if not self.num_chunks:
            return (self.blocks,)
        ends = [0, *range(1, 2 * self.num_chunks + 2, 2), len(self.blocks)]
        groups = [self.blocks[start:stop] for start, stop in pairwise(ends)]
        return tuple(group for group in groups if group)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Return the two blocks of each chunk of experts, in the order of the forward."""
        return self.passes[1 : 1 + self.num_chunks]

    @property
    def behind_chunks(self) -> tuple[int, ...]:
        """Return the block that runs behind the experts, if there is one."""
        return self.blocks[1 + 2 * self.num_chunks :]


@dataclass(frozen=True, slots=True)
class Ends:
    """The outer blocks that stream."""

    embeddings: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    trained_embeddings: tuple[int, ...] = ()
    """The embeddings that backward comes to; it passes no others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The way in which the micro-batches of a round pass the model."""

    num_micro_batches: int = 1
    """The number of micro-batches. They start in reverse order, so that autograd, which takes what was made
    last first, adds up gradients in their own order."""
    num_passes_before: int = 0
    """Passes without gradients that come first, all micro-batches together in each."""
    heads_in_turn: bool = True
    """The backward of each micro-batch's head follows its forward; False: all have passed the head before the
    backward begins, as where somebody else runs it."""
    in_succession: bool = False
    """Each micro-batch passes all layers before the next one begins, in the forward and in the backward,
    which begins when all have passed: gradients add up as those of rounds do."""
    loads: bool = False
    """Earlier rounds of the step left gradients to add to."""
    completes: bool = True
    """No later round of the step follows."""


def round_visits(
    layers: Sequence[LayerPlan],
    round_: Round | None = None,
    *,
    outer: Sequence[int] = (),
    behind: Sequence[int] = (),
    ends: Ends | None = None,
    first_trained: int = 0,
) -> list[Visit]:
    """List the visits of one round: all micro-batches pass a layer before the next is entered.

    Args:
        layers: The layers, in forward order.
        round_: The round; None: that of one micro-batch.
        outer: The blocks in no layer. They are in use during a whole pass: the model finds them when it
            begins, and their gradients are complete when its backward ends.
        behind: The outer blocks that the model passes behind all layers: their gradients are complete when
            the head's backward ends.
        ends: The outer blocks that stream. The micro-batches pass the embedding as they start, and the head
            when all of them have passed the last layer.
        first_trained: The layer with which backward ends: nothing before it is trained.
    """
    ends, round_ = ends or Ends(), round_ or Round()
    in_succession, num_micro_batches = round_.in_succession, round_.num_micro_batches
    numbers = range(num_micro_batches)
    assert not (in_succession and round_.num_passes_before)
    in_turn = round_.heads_in_turn
    before = pass_visits(layers, num_micro_batches, outer=outer, ends=ends, heads_in_turn=in_turn)
    visits = before * round_.num_passes_before

    def backward(block: int, number: int, *, restores: bool = False) -> Visit:
        return Visit(
            block,
            is_backward=True,
            micro_batch=number,
            adds=number > 0 and not in_succession,
            loads=round_.loads or (number > 0 and in_succession),
            is_last=number == num_micro_batches - 1 or in_succession,
            completes=round_.completes and (number == num_micro_batches - 1 or not in_succession),
            restores=block if restores else -1,
        )

    forward = [_head_visits(number, outer, ends) for number in numbers]
    back = [
        [
            Visit(HEAD, is_backward=True, micro_batch=number)
            if visit.block == HEAD
            else replace(backward(visit.block, number), is_head=True)
            for visit in forward[number]
        ]
        + [backward(block, number) for block in reversed(behind)]
        for number in numbers
    ]
    layers_back, made_before = _layers_back(
        layers, num_micro_batches, first_trained, backward, together_in_layers=not in_succession
    )
    ends_back = [
        [
            backward(block, number)
            for block in (*ends.trained_embeddings, *reversed(outer))
            if block not in behind
        ]
        for number in numbers
    ]
    if in_succession:
        for number in reversed(numbers):
            visits += _visits_before_head(layers, [number], outer=outer, ends=ends, saves=True)
            visits += forward[number]
        for number in numbers:
            visits += back[number]
            for made, of_layer in zip(made_before, layers_back, strict=True):
                visits += [*(made if number == 0 else ()), *of_layer[number]]
            visits += ends_back[number]
        return visits
    visits += _visits_before_head(layers, numbers[::-1], outer=outer, ends=ends, saves=True)
    turns = [part for number in numbers for part in (forward[number], back[number])]
    for part in turns if in_turn else [*reversed(forward), *back]:
        visits += part
    for made, of_layer in zip(made_before, layers_back, strict=True):
        visits += [*made, *(visit for of_one in of_layer for visit in of_one)]
    return visits + [visit for of_one in ends_back for visit in of_one]


def _layers_back(
    layers: Sequence[LayerPlan],
    num_micro_batches: int,
    first_trained: int,
    backward: Callable[..., Visit],
    *,
    together_in_layers: bool,
) -> tuple[list[list[list[Visit]]], list[list[Visit]]]:
    """List the visits of the backward through the layers, the last layer first.

    Returns:
        The visits of each layer, by micro-batch; and those before the first one's, which make boundaries
        again.
    """
    found: list[list[list[Visit]]] = []
    made_before: list[list[Visit]] = []
    numbers = range(num_micro_batches)
    made_again: set[int] = set()
    restored: set[int] = set()
    """Layers whose boundaries a chain has brought back: they stay until their own backward."""
    for number in range(len(layers) - 1, first_trained - 1, -1):
        layer = layers[number]
        made: list[Visit] = []
        if layer.drops and number not in made_again:
            start = number
            while start > 0 and layers[start].drops and start not in made_again:
                start -= 1
            for earlier in range(start, number):
                restores = earlier == start and layers[earlier].saves
                made += _forward(layers[earlier], range(num_micro_batches)[::-1], restores=restores)
                made_again.add(earlier + 1)
                restored |= {earlier} if restores else set()
        made_before.append(made)
        waits = layer.saves and number < len(layers) - 1 and number not in restored
        if layer.num_chunks:
            together = [numbers] if together_in_layers else [[micro_batch] for micro_batch in numbers]
            found.append([_chunks_back(layer, those, backward, restores=waits) for those in together])
            continue
        of_layer = []
        for micro_batch in numbers:
            *others, _ = layer.blocks
            again = others if layer.is_recomputed else ()
            visits = [Visit(block, micro_batch=micro_batch, stays=True) for block in again]
            for index, block in enumerate(reversed(layer.blocks)):
                visits.append(backward(block, micro_batch, restores=waits and index == 0))
            of_layer.append(visits)
        found.append(of_layer)
    return found, made_before


def _chunks_back(
    layer: LayerPlan, micro_batches: Sequence[int], backward: Callable[..., Visit], *, restores: bool
) -> list[Visit]:
    """List the backward's visits of a layer whose experts come apart: of all micro-batches, pass by pass.

    A chunk's recomputation and its backward follow each other, and what was before the experts comes last,
    run again then. Only where the layer is recomputed and a block runs behind the experts, all of it but them
    is run again first.
    """
    main, behind = layer.blocks[0], layer.behind_chunks
    last = layer.blocks[-1]
    visits: list[Visit] = []
    for number in micro_batches:
        of_one = [Visit(main, micro_batch=number, stays=True)] if layer.is_recomputed and behind else []
        of_one += [backward(block, number) for block in behind]
        if restores and of_one:
            of_one[0] = replace(of_one[0], restores=last)
        visits += of_one
    for first, second in reversed(layer.chunks):
        for number in micro_batches:
            again = Visit(first, micro_batch=number, stays=True)
            is_first = restores and not behind and first == layer.blocks[-2]
            visits += [
                replace(again, restores=last) if is_first else again,
                backward(second, number),
                backward(first, number),
            ]
    return visits + [backward(main, number) for number in micro_batches]


def pass_visits(
    layers: Sequence[LayerPlan],
    num_micro_batches: int = 1,
    *,
    outer: Sequence[int] = (),
    ends: Ends,
    heads_in_turn: bool = True,
) -> list[Visit]:
    """List the visits of one pass of all micro-batches without gradients; see `round_visits`."""
    numbers = range(num_micro_batches)
    visits = _visits_before_head(layers, numbers[::-1], outer=outer, ends=ends, saves=False)
    for number in numbers if heads_in_turn else reversed(numbers):
        visits += _head_visits(number, outer, ends)
    return visits


def _visits_before_head(
    layers: Sequence[LayerPlan], numbers: Sequence[int], *, outer: Sequence[int], ends: Ends, saves: bool
) -> list[Visit]:
    """List the forward visits of a pass, with gradients (`saves`) or without, up to the last layer.

    `numbers` are of its micro-batches, in the order in which they pass.
    """
    visits = [Visit(block, micro_batch=n) for n in numbers for block in (*outer, *ends.embeddings)]
    for number, layer in enumerate(layers):
        # what is saved last is needed first: it stays where it is
        saves_layer = saves and layer.saves and number < len(layers) - 1
        visits += _forward(layer, numbers, saves=saves_layer)
    return visits


def _head_visits(micro_batch: int, outer: Sequence[int], ends: Ends) -> list[Visit]:
    """List the forward visits of the head: of its own blocks where they stream."""
    if ends.heads:
        return [Visit(block, micro_batch=micro_batch, is_head=True) for block in ends.heads]
    return [Visit(HEAD, micro_batch=micro_batch)] if outer else []


def layer_plans(
    policies: Sequence[Policy],
    blocks: Sequence[Sequence[int]],
    boundaries: str,
    saved: Sequence[tuple[int, int]] | None = None,
    num_chunks: Sequence[int] | None = None,
) -> tuple[LayerPlan, ...]:
    """Say how each decoder layer is passed.

    Args:
        policies: The policy of each layer: what stays of it until its backward.
        blocks: The numbers of the blocks of each layer.
        boundaries: The place where the inputs of recomputed layers wait.
        saved: The bytes that a micro-batch saves of each layer, and the room that they take on the host;
            None: these are not known.
        num_chunks: The number of chunks of each layer's experts; None: none come apart.
    """
    sizes = saved or [(0, 0)] * len(policies)
    return tuple(
        LayerPlan(
            tuple(blocks[number]),
            num_chunks=num_chunks[number] if num_chunks else 0,
            is_recomputed=policy.reruns,
            saves=policy.leaves_device(number, boundaries) and (saved is None or size > 0),
            drops=policy.drops(number),
            saved_bytes=size,
            room_bytes=room,
        )
        for number, (policy, (size, room)) in enumerate(zip(policies, sizes, strict=True))
    )


def step_visits(
    visits_of: Callable[[_Size, bool, bool], list[Visit]], rounds: Sequence[_Size], sums: Sequence[RoundSums]
) -> list[Visit]:
    """List the visits of all rounds of a step.

    Args:
        visits_of: A function that lists the visits of a round, by its size, whether earlier ones left
            gradients to add to, and whether no later one follows.
        rounds: The size of each round, as `visits_of` takes it.
        sums: The partial sums that each round loads and leaves, as `StepSums.by_round` returns them.
    """
    visits = []
    for number, size in enumerate(rounds):
        of_round = visits_of(size, number > 0, number == len(rounds) - 1)
        own = sums[number]
        if own != ONE_RUN:
            of_round = [replace(visit, sums=own) if visit.is_backward else visit for visit in of_round]
        if own.exchanges:
            of_round.append(Visit(ROUND_END, completes=number == len(rounds) - 1, sums=own))
        visits += of_round
    return visits


def marked(
    seen: Sequence[Visit], *, loads: bool, completes: bool, heads: Collection[int] = ()
) -> list[Visit]:
    """Turn the bare visits of a round that was seen into visits to foresee; no activations are moved."""
    last = {visit.block: number for number, visit in enumerate(seen) if visit.is_backward}
    passed: set[int] = set()
    visits = []
    stays = _staying(seen)
    for number, visit in enumerate(seen):
        if not visit.is_backward:
            visits.append(replace(visit, is_head=visit.block in heads, stays=number in stays))
            continue
        visits.append(
            replace(
                visit,
                adds=visit.block in passed,
                loads=loads,
                is_last=number == last[visit.block],
                completes=completes,
                is_head=visit.block in heads,
            )
        )
        passed.add(visit.block)
    return visits


def _staying(seen: Sequence[Visit]) -> set[int]:
    """Return the places of visits after which a block stays until its backward, if that came."""
    found: set[int] = set()
    goes_back: dict[tuple[int, int], bool] = {}
    """By block and micro-batch: whether the visit that comes next is a backward."""
    for number, visit in reversed([*enumerate(seen)]):
        key = visit.block, visit.micro_batch
        if visit.stays and goes_back.get(key, False):
            found.add(number)
        goes_back[key] = visit.is_backward
    return found


def most_open(visits: Sequence[Visit]) -> int:
    """Count the blocks whose gradients add up at the same time, at most: the buffers that visits take."""
    is_open: set[int] = set()
    most = 0
    for visit in visits:
        if visit.is_backward:
            is_open.add(visit.block)
            most = max(most, len(is_open))
            if visit.is_last:
                is_open.remove(visit.block)
    return most


def _forward(
    layer: LayerPlan,
    numbers: Sequence[int],
    *,
    saves: bool = False,
    restores: bool = False,
) -> list[Visit]:
    first, last = layer.blocks[0], layer.blocks[-1]
    return [
        Visit(
            block,
            micro_batch=micro_batch,
            saves=saves and block == last,
            restores=last if restores and block == first else -1,
        )
        for blocks in layer.passes
        for micro_batch in numbers
        for block in blocks
    ]
