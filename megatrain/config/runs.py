"""Runs: how the gradients of a step add up, whatever does the additions.

A step is a number of runs, a power of two: contiguous and equally long pieces of its micro-batches. Inside a
run gradients add up in order, ((g0 + g1) + g2) + ..., and the sums of runs by a balanced binary tree,
(r0 + r1) + (r2 + r3), in fp32. A part of a step that is a whole subtree of it, such as the half of a rank of
two, makes its part of the sum alone, so the bits do not depend on who adds what.

While micro-batches pass, the sums that wait for their other half are a stack: after five runs, that of four
and that of one. Two of equal height become one at once, as a binary counter carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a step, or of a rank's part of it."""

    number: int = 1
    """How many: a power of two."""
    length: int = 1
    """Micro-batches of each."""

    @classmethod
    def of(cls, number: int, num_micro_batches: int) -> Runs:
        """Cut micro-batches into so many runs.

        Raises:
            ConfigError: They cannot be cut.
        """
        if num_micro_batches % number:
            below = num_micro_batches // number * number
            nearest = f"{below} or {below + number}" if below else str(number)
            raise ConfigError(
                f"a step of {num_micro_batches} micro-batches cannot be cut into {number} equally long "
                f"runs (parallel.shards); use {nearest}"
            )
        return cls(number, num_micro_batches // number)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of all of them."""
        return self.number * self.length

    @property
    def most_sums(self) -> int:
        """The most sums that are in the stack at a time."""
        return self.number.bit_length()

    def shared_out(self, num_ranks: int, sequence: int = 1) -> int:
        """Return how many of them each of several ranks makes.

        Args:
            num_ranks: That train together.
            sequence: Neighbours among them that make the same ones, each of its part of every row.

        Raises:
            ConfigError: They cannot be shared out evenly.
        """
        num_ranks = num_places(num_ranks, sequence)
        if self.number % num_ranks:
            raise ConfigError(
                f"a step has {self.number} runs (parallel.shards), which {num_ranks} ranks cannot share out "
                f"evenly; use parallel.shards={max(self.number, num_ranks)}, or a power of two of ranks, at "
                f"most {self.number}"
            )
        return self.number // num_ranks

    def num_sums(self, done: int) -> int:
        """Return how many sums are in the stack after so many micro-batches."""
        whole, rest = divmod(done, self.length)
        return whole.bit_count() + (rest > 0)

    def kept_sums(self, rounds: Sequence[int], *, is_wide: bool) -> int:
        """Return how many sums in fp32 are kept between rounds, beside the plane of complete gradients.

        Args:
            rounds: The micro-batches of each.
            is_wide: That plane cannot hold a sum: it is in bf16, or of several ranks. Else it holds the one
                that there is without runs.
        """
        if self.number == 1 and not is_wide:
            return 0
        return max(self.left_after(rounds)[:-1], default=0)

    def left_after(self, rounds: Sequence[int]) -> list[int]:
        """Return how many sums are left after each round, of which `rounds` says the micro-batches."""
        return [self.num_sums(done) for done in accumulate(rounds)]


def num_places(num_ranks: int, sequence: int) -> int:
    """Return among how many the micro-batches of a step are shared out.

    Args:
        num_ranks: That train together.
        sequence: Neighbours among them that train the same ones, each its part of every row.

    Raises:
        ConfigError: It does not divide them.
    """
    if num_ranks % sequence:
        raise ConfigError(
            f"parallel.sequence is {sequence}, so many ranks share out the tokens of every row, but "
            f"{num_ranks} {'trains alone' if num_ranks == 1 else 'train together'}; use a multiple of "
            f"{sequence} ranks, or parallel.sequence={num_ranks & -num_ranks}"
        )
    return num_ranks // sequence


def check_shards(shards: int) -> int:
    """Return a number of runs.

    Raises:
        ValueError: It is no power of two.
    """
    if shards < 1 or shards.bit_count() != 1:
        raise ValueError("use a power of two: 1, 2, 4, 8, ...")
    return shards
