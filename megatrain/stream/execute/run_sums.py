"""Which run of a step each block's gradient adds up, and which sums of runs have become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from megatrain.config.runs import Runs
from megatrain.errors import ModelError

SumsOf = Callable[[int], Tensor]
"""Returns a block's partial sum at a height of the stack: (num_state,) fp32 on the device."""


class RunSums:
    """The stack of partial sums of every block, as `Runs` describes it; the sums are where `sums_of` says."""

    def __init__(self, num_blocks: int) -> None:
        """Expect steps of one run."""
        self.runs = Runs()
        self.round = range(1)
        """The numbers, within the step, of the micro-batches of the round that is going on."""
        self.are_shared = False
        """Every round has runs of its own, whose sum is exchanged when it ends: it counts as a step."""
        self.summed: set[int] = set()
        """Blocks whose exchange of this round is enqueued."""
        self._open: list[int | None] = [None] * num_blocks
        """By block: the run whose sum is at the top, and not complete."""
        self._done = [0] * num_blocks
        """By block: how many runs are complete."""

    def clear(self) -> None:
        """Forget the step's sums."""
        self._open = [None] * len(self._open)
        self._done = [0] * len(self._done)
        self.round = range(1)
        self.summed.clear()

    def begin_round(self, numbers: range) -> None:
        """Go on to the round of micro-batches of these numbers."""
        if self.are_shared:
            self.clear()
            numbers = range(len(numbers))
        self.round = numbers
        self.summed.clear()

    def top(self, block: int) -> int:
        """Return the height of the sum to which the block's next gradient adds."""
        return self._done[block].bit_count()

    def enter(self, block: int, micro_batch: int, sums_of: SumsOf) -> bool:
        """Go on to the run of a micro-batch, by its number within the round.

        Returns:
            Whether the sum at the top is of this run already; otherwise whatever is there is old.

        Raises:
            ModelError: The run was complete: its sum is a part of others.
        """
        run = self.round[micro_batch] // self.runs.length
        if run < self._done[block]:
            raise ModelError(
                "gradients of a micro-batch come after those of later ones, so they add up in no run; use "
                "memory.lockstep=1, or parallel.shards=1"
            )
        self._complete(block, run, sums_of)
        is_new = self._open[block] is None
        self._open[block] = run
        return not is_new

    def leave(self, block: int, sums_of: SumsOf) -> None:
        """Take note that no more comes of the round that is going on, and join what is complete.

        A run that left no gradient of the block counts as zeros.
        """
        whole, rest = divmod(self.round.stop, self.runs.length)
        self._complete(block, whole, sums_of)
        if rest and self._open[block] is None:
            sums_of(self.top(block)).zero_()
            self._open[block] = whole

    def _complete(self, block: int, num_runs: int, sums_of: SumsOf) -> None:
        for run in range(self._done[block], num_runs):
            if self._open[block] is None:
                sums_of(self.top(block)).zero_()
            self._open[block] = None
            for height in _joins(run):
                sums_of(height).add_(sums_of(height + 1))
            self._done[block] = run + 1


def _joins(run: int) -> Iterator[int]:
    """Yield the heights at which sums become one when a run is complete: it carries as a binary counter."""
    height = run.bit_count()
    while run & 1:
        height -= 1
        yield height
        run >>= 1
