"""One block in one call of its layer: what is known of it from its forward to its backward."""

from __future__ import annotations

from torch import Tensor

from megatrain.plan.program.features.roles import BlockPass

BETWEEN = "outer"
"""Label of what compute does between two visits; of no operation."""


class BlockVisit:
    """A block that is passed: forward, perhaps again in the backward, and backward, one at a time."""

    operation: BlockPass
    """What the program says of it, since it was opened last."""

    def __init__(self, block: int, micro_batch: int, call: object) -> None:
        """Know where it belongs.

        Args:
            block: The number of the block that is visited.
            micro_batch: The number of the micro-batch within the round.
            call: The object that stands for the call of the layer that the block is a part of.
        """
        self.block = block
        self.micro_batch = micro_batch
        self.call = call
        self.place: Tensor | None = None
        """The block's bytes on the device, while it is open."""
        self.waits = False
        """Blocks of its own call come between its forward that was run again and its backward."""
        self.is_again = False
        """A forward that was run before runs again, in the backward's visit or in one of its own."""
