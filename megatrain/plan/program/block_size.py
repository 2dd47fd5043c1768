"""The facts of a block that a program needs: how it is passed, and the bytes that move with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.runs import RoundSums
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.ownership import Share, piece_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSize:
    """The bytes and facts of a block that a schedule needs."""

    is_streamed: bool
    is_trained: bool
    fetch_bytes: int
    """Bytes of the working weights as the host keeps them."""
    offload_bytes: int
    """Bytes of a complete gradient."""
    accumulator_bytes: int
    """Bytes of a gradient that is still adding up."""
    share_bytes: int = 0
    """Bytes of a rank's share of such a gradient, of each shard of rows."""
    exchange_bytes: int = 0
    """Bytes of sums that a rank sends to others, for their shares of the block."""
    spread_bytes: int = 0
    """Bytes of new weights that a rank sends to other nodes, or, of a resident block, to all ranks."""
    gather_bytes: int = 0
    """Bytes of the working weights that other ranks fetch, where ranks gather them."""
    added_bytes: int = 0
    """Bytes of memory that the host reads and writes to add a gradient to the sum of those before it."""
    last_added_bytes: int = 0
    """The same, of the last one: the sum is rounded to the working dtype."""
    parked_bytes: int = 0
    """Bytes on drives of a complete gradient that waits there."""
    parked_sum_bytes: int = 0
    """The same, of a sum that waits there between rounds."""
    update_bytes: int = 0
    """Bytes of memory that an update reads and writes."""
    whole_bytes: int = 0
    """Bytes of weights and state that a block updated on the device sends home: those of a share."""
    updates_on_device: bool = False
    """A resident block with all of its state on the device: nothing of it crosses the link."""

    def sum_bytes(self, sums: RoundSums) -> int:
        """Return the bytes of each of these partial sums."""
        return self.share_bytes if sums.are_shares else self.accumulator_bytes

    @classmethod
    def of(
        cls,
        sizes: BlockBytes,
        *,
        is_streamed: bool,
        on_device: bool,
        optimizer: Optimizer,
        share: Share | None = None,
        gathers_among: int = 1,
        sequence: int = 1,
    ) -> BlockSize:
        """Return what a schedule needs to know of a block, but for what a rank sends to others.

        Args:
            sizes: The sizes of the block.
            is_streamed: Whether its weights are on the device for a visit at a time.
            on_device: Whether it is updated on the device.
            optimizer: The optimizer that updates it.
            share: The share of its state that this rank keeps; None: all.
            gathers_among: The number of ranks that fetch a piece of the weights each, and gather them; 1:
                none does.
            sequence: The number of ranks that share out rows.
        """
        own = sizes if share is None else share.sizes
        size = cls(
            is_streamed=is_streamed,
            is_trained=sizes.num_state > 0,
            fetch_bytes=sizes.kept_bytes,
            offload_bytes=own.gradient_bytes,
            accumulator_bytes=sizes.accumulator_bytes,
            share_bytes=4 * sequence * own.num_state,
            gather_bytes=(gathers_among - 1) * piece_bytes(sizes.kept_bytes, gathers_among),
            added_bytes=sizes.added_bytes(completes=False),
            last_added_bytes=sizes.added_bytes(completes=True),
            parked_bytes=pools.parked_gradient(sizes)
            if share is None
            else sum(map(len, share.gradient_pages(sizes.num_split))),
            parked_sum_bytes=pools.parked_sum(sizes),
            updates_on_device=on_device,
        )
        return size.with_optimizer(sizes, optimizer, share)

    def with_optimizer(
        self, sizes: BlockBytes, optimizer: Optimizer, share: Share | None = None
    ) -> BlockSize:
        """Return the same with another optimizer; the arguments are those of `of`."""
        own = sizes if share is None else share.sizes
        whole = own.plain_bytes + own.remainder_bytes + own.optimizer_bytes(optimizer)
        return replace(self, update_bytes=own.update_bytes(optimizer), whole_bytes=whole)
