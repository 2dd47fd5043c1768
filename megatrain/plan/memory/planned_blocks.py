"""The blocks of a choice: what streams as one, or stays on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.exchange import Exchange
from megatrain.layout.ownership import planned_share
from megatrain.model.profile.anatomy import Anatomy, Fragment
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
    is_last: bool = True
    """It is the last of its layer's blocks."""


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
    for number, layer in enumerate(anatomy.layers):
        groups: Sequence[Sequence[Fragment]] = [layer.fragments]
        if choice.fragments:
            groups = [[fragment] for fragment in layer.fragments]
        is_resident = number < choice.resident_layers
        total = max(1, layer.num_params)
        for place, parts in enumerate(groups):
            share = sum(fragment.num_params for fragment in parts) / total
            run = parts[0].largest_run if choice.fragments else layer.largest_run
            found = block(parts, number, share, run, streams=not is_resident, on_device=is_resident)
            blocks.append(replace(found, is_last=place == len(groups) - 1))
    for part in anatomy.outer:
        streams = choice.outer_streams and part.may_stream
        blocks.append(
            block([part], -1, 0.0, part.largest_run, streams=streams, on_device=choice.outer_resident)
        )
    return blocks
