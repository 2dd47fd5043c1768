"""The blocks of a choice: what streams as one, or stays on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.exchange import Exchange
from megatrain.layout.ownership import planned_share
from megatrain.model.profile.anatomy import Anatomy, Fragment, Layer
from megatrain.plan.program.block_size import BlockSize


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """The part of a model that streams as one under a choice."""

    size: BlockSize
    """The size of the block, as the schedule knows it."""
    sizes: BlockBytes
    layer: int
    """-1: outside all layers."""
    largest_run: int
    """State elements that an update passes in one go, at most."""
    share: float
    """The part of its layer's work that is its own."""
    reruns: bool = True
    """In its backward's visit runs what the layer's policy runs again of it; of others it has visits of its
    own."""
    runs_again: bool | None = None
    """Whether its forward runs again in its backward's visit, whatever the policy: of a layer whose experts
    come apart. None: as `reruns` says."""


def list_blocks(
    anatomy: Anatomy, choice: Choice, optimizer: Optimizer, batch: StepBatch | None = None
) -> list[PlannedBlock]:
    """List the blocks of a choice: of all layers in forward order, then the outer ones.

    Args:
        anatomy: The anatomy of the model.
        choice: The choice, in which nothing is open.
        optimizer: The optimizer that updates them.
        batch: The batch, which says how many ranks there are, see `planned_share`; None: there is one.
    """
    exchange, among = Exchange(), 1
    if batch is not None:
        exchange, among = Exchange.of(batch), batch.gathers_among

    def block(
        parts: Sequence[Fragment],
        layer: int,
        share: float,
        largest_run: int,
        *,
        streams: bool,
        on_device: bool,
    ) -> PlannedBlock:
        sizes = sum((part.sizes for part in parts), BlockBytes())
        others = (exchange.num_ranks if on_device else exchange.num_nodes) - 1
        own = None if exchange.num_ranks == 1 else planned_share(sizes, exchange.num_ranks)
        size = BlockSize.of(
            sizes,
            is_streamed=streams,
            on_device=on_device,
            optimizer=optimizer,
            share=own,
            gathers_among=among,
            sequence=exchange.sequence,
        )
        spread_bytes = 0 if own is None else others * own.sizes.working_bytes
        size = replace(size, exchange_bytes=exchange.planned_bytes(sizes), spread_bytes=spread_bytes)
        return PlannedBlock(size, sizes, layer, largest_run, share)

    blocks = []
    for number, layer in enumerate(anatomy.as_split(choice).layers):
        groups: Sequence[Sequence[Fragment]] = [layer.fragments]
        if choice.comes_apart:
            groups = [[fragment] for fragment in layer.fragments]
        is_resident = number < choice.resident_layers
        total = max(1, layer.num_params)
        for place, parts in enumerate(groups):
            share = sum(fragment.num_params for fragment in parts) / total
            if layer.num_chunks:  # few parameters beside the experts do much of the work
                share = _flops(parts) / _flops(layer.fragments)
            run = parts[0].largest_run if choice.comes_apart else layer.largest_run
            found = block(parts, number, share, run, streams=not is_resident, on_device=is_resident)
            blocks.append(
                replace(
                    found,
                    reruns=place == len(groups) - 1 or layer.num_chunks > 0,
                    runs_again=_runs_again(layer, place),
                )
            )
    for part in anatomy.outer:
        streams = choice.outer_streams and part.may_stream
        blocks.append(
            block([part], -1, 0.0, part.largest_run, streams=streams, on_device=choice.outer_resident)
        )
    return blocks


def _flops(parts: Sequence[Fragment]) -> float:
    return sum(part.forward.matmul_flops + part.forward.attention_flops for part in parts)


def _runs_again(layer: Layer, place: int) -> bool | None:
    """Say of a part of a layer whose experts come apart whether its backward begins with its forward.

    That of the second matrix of a chunk does, and that of the first matrix has a visit of its own for it. The
    rest does as the policy says, but for what is before the experts where something is behind them: that has
    such a visit too.
    """
    is_behind = len(layer.fragments) > 1 + 2 * layer.num_chunks
    if not layer.num_chunks or place > 2 * layer.num_chunks or (place == 0 and not is_behind):
        return None
    return place > layer.num_chunks
