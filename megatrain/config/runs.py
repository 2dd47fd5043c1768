"""Runs are the pieces of a step by which its gradients add up, whatever does the additions.

A step is a number of runs, a power of two: contiguous and equally long pieces of its micro-batches. Inside a
run gradients add up in order, ((g0 + g1) + g2) + ..., and the sums of runs by a balanced binary tree, (r0 +
r1) + (r2 + r3), in fp32. A part of a step that is a whole subtree, such as the half of each of two ranks,
makes its part of the sum alone, so the bits do not depend on who adds what.

While micro-batches pass, the sums that wait for their other half are a stack: after five runs, that of four
and that of one. Two of equal height are added at once, as a binary counter carries.

With several ranks, each takes its part of every round where rounds hold whole runs: then the sums that all
ranks make in a round form a whole subtree too. The ranks exchange them at once, and a stack of shares waits
for later rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TypeVar

from megatrain.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a step, or of a rank's part of it."""

    number: int = 1
    """The number of runs, a power of two."""
    length: int = 1
    """The number of micro-batches of each run."""

    @classmethod
    def of(cls, number: int, num_micro_batches: int) -> Runs:
        """Cut micro-batches into so many runs.

        Raises:
            ConfigError: The micro-batches cannot be cut so.
        """
        if num_micro_batches % number:
            below = num_micro_batches // number * number
            nearest = f"{below} or {below + number}" if below else str(number)
            raise ConfigError(
                f"a step of {num_micro_batches} micro-batches (train.grad_accumulation) cannot be cut into "
                f"{number} equally long runs (parallel.shards; one per rank, if left open); use {nearest} "
                "micro-batches"
            )
        return cls(number, num_micro_batches // number)

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches of all runs."""
        return self.number * self.length

    def shared_out(self, num_ranks: int, sequence: int = 1) -> int:
        """Return the number of runs that each of several ranks makes.

        Args:
            num_ranks: The number of ranks that train together.
            sequence: The number of neighbours that make the same runs, each of its part of every row.

        Raises:
            ConfigError: The runs cannot be shared out evenly.
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
        """Return the number of sums in the stack after so many micro-batches."""
        whole, rest = divmod(done, self.length)
        return whole.bit_count() + (rest > 0)

    def parts(self, lockstep: int, num_ranks: int, sequence: int = 1) -> list[list[int]]:
        """Return the numbers of the micro-batches of a whole step that each of several ranks takes.

        Args:
            lockstep: The number of micro-batches of a round of each rank.
            num_ranks: The number of ranks that train together.
            sequence: The number of neighbours that make the same runs, as in `shared_out`.

        Raises:
            ConfigError: `shared_out` raises it.
        """
        part = Runs(self.shared_out(num_ranks, sequence), self.length)
        sums = StepSums.of(part, lockstep, num_ranks, sequence)
        at_once = sums.rounds[0] if sums.are_shared else part.num_micro_batches
        numbers, places = range(self.num_micro_batches), num_places(num_ranks, sequence)
        turns = [numbers[first : first + at_once] for first in numbers[::at_once]]
        own = [[number for turn in turns[place::places] for number in turn] for place in range(places)]
        return [own[rank // sequence] for rank in range(num_ranks)]


@dataclass(frozen=True, slots=True)
class SumRoom:
    """The room for partial sums in fp32 of a gradient."""

    whole: int = 0
    """The number of full-size partial sums that fit."""
    shares: int = 0
    """The number of sums of a rank's share that fit."""
    num_ranks: int = 1
    """The number of ranks, each of which has a share."""
    sequence: int = 1
    """The number of ranks that share out rows: sums of each shard of rows stay apart until the last."""

    def holds(self, other: SumRoom) -> bool:
        """Return whether there is as much room as in another one."""
        return self.whole >= other.whole and self.shares >= other.shares


@dataclass(frozen=True, slots=True)
class RoundSums:
    """The partial sums that a round loads and leaves, by their places in the stack."""

    loaded: range = range(1)
    """The places of the sums that earlier rounds left, to which it adds."""
    left: range = range(1)
    """The places of the sums that it leaves."""
    are_shares: bool = False
    """Whether they are shares: ranks exchange as a round ends, and add what they get to what is loaded."""
    exchanges: bool = False
    """Whether ranks exchange when it ends."""


ONE_RUN = RoundSums()
"""The sums of one rank and one run: there is one sum, and every round adds to it."""


@dataclass(frozen=True)
class StepSums:
    """The partial sums of a step, or of a rank's part of it, over its rounds."""

    runs: Runs
    rounds: tuple[int, ...]
    """The number of micro-batches of each round."""
    num_ranks: int = 1
    sequence: int = 1
    on_drives: bool = False
    """Whether the sums wait on drives between rounds."""

    @classmethod
    @lru_cache(maxsize=32)  # a search asks for the same few over and over; a step may have 1e5 rounds
    def of(
        cls, runs: Runs, lockstep: int, num_ranks: int = 1, sequence: int = 1, *, on_drives: bool = False
    ) -> StepSums:
        """Return the sums of rounds of so many micro-batches each, except perhaps the last."""
        rounds = tuple(round_sizes(runs.num_micro_batches, lockstep))
        return cls(runs, rounds, num_ranks, sequence, on_drives)

    @cached_property
    def are_shared(self) -> bool:
        """Return whether ranks exchange after every round: each is whole runs, as many as in the others."""
        is_whole = len({*self.rounds}) == 1 and self.rounds[0] % self.runs.length == 0
        return is_whole and len(self.rounds) > 1 and self.num_ranks > self.sequence

    @property
    def runs_at_once(self) -> Runs:
        """Return the runs that a rank adds up before an exchange: those of a round, or all."""
        if not self.are_shared:
            return self.runs
        return Runs(self.rounds[0] // self.runs.length, self.runs.length)

    @cached_property
    def by_round(self) -> list[RoundSums]:
        """Return the loaded and left sums of each round."""
        last = len(self.rounds) - 1
        if self.are_shared:
            found = []
            for number in range(len(self.rounds)):
                stop = number.bit_count()
                start = (number + 1).bit_count() - 1
                found.append(RoundSums(range(start, stop), range(start, start + 1), True, exchanges=True))
            return found
        counts = [self.runs.num_sums(done) for done in accumulate(self.rounds)]
        before = [1, *counts]
        return [
            RoundSums(range(before[n]), range(left), exchanges=n == last and self.num_ranks > 1)
            for n, left in enumerate(counts)
        ]

    @property
    def on_device(self) -> SumRoom:
        """Return the room for the most sums that exist at a time while a round goes on."""
        shares = (len(self.rounds) - 1).bit_length() if self.are_shared else 0
        return SumRoom(self.runs_at_once.number.bit_length(), shares, self.num_ranks, self.sequence)

    def between(self, *, is_wide: bool) -> SumRoom:
        """Return the room in RAM for the sums kept between rounds, beside the plane of complete gradients.

        Args:
            is_wide: Whether that plane cannot hold a sum, since it is in bf16 or there are several ranks.
                Otherwise it holds the one sum that there is without runs.
        """
        if self.on_drives or (self.runs.number == 1 and self.num_ranks == 1 and not is_wide):
            return SumRoom()
        most = max((each.left.stop for each in self.by_round[:-1]), default=0)
        if self.are_shared and most:
            return SumRoom(0, most, self.num_ranks, self.sequence)
        return SumRoom(0 if self.are_shared else most)


def round_sizes(num_micro_batches: int, lockstep: int) -> list[int]:
    """Return the number of micro-batches of each round of so many together; the last may have fewer."""
    starts = range(0, num_micro_batches, lockstep)
    return [min(lockstep, num_micro_batches - start) for start in starts]


def in_order(parts: Sequence[Sequence[int]], found: Sequence[Sequence[T]], sequence: int = 1) -> list[T]:
    """Return all ranks' results for their micro-batches, in the order of one rank.

    Args:
        parts: The numbers of the micro-batches of each rank.
        found: The results of each rank, one for each of its micro-batches.
        sequence: The number of ranks that share out rows: the first shard of each micro-batch comes first.
    """
    return [
        value
        for shard in range(sequence)
        for _, value in sorted(
            (
                pair
                for own, values in zip(parts[shard::sequence], found[shard::sequence], strict=True)
                for pair in zip(own, values, strict=True)
            ),
            key=lambda pair: pair[0],
        )
    ]


def num_places(num_ranks: int, sequence: int) -> int:
    """Return the number of places among which the micro-batches of a step are shared out.

    Args:
        num_ranks: The number of ranks that train together.
        sequence: The number of neighbours that train the same micro-batches, each its part of a row.

    Raises:
        ConfigError: `sequence` does not divide the number of ranks.
    """
    if num_ranks % sequence:
        raise ConfigError(
            f"parallel.sequence is {sequence}, so many ranks share out the tokens of every row, but "
            f"{num_ranks} {'trains alone' if num_ranks == 1 else 'train together'}; use a multiple of "
            f"{sequence} ranks, or parallel.sequence={num_ranks & -num_ranks}"
        )
    return num_ranks // sequence


def power_of_two(number: int) -> int:
    """Return a number of runs, or of ranks.

    Raises:
        ValueError: The number is no power of two.
    """
    if number < 1 or number.bit_count() != 1:
        below = 1 << max(number.bit_length() - 1, 0)
        raise ValueError(f"use a power of two, such as {below} or {2 * below}")
    return number


def require_power_of_two(number: int, said: str) -> None:
    """Refuse a number of runs, or of ranks, that is no power of two.

    Args:
        number: The number of runs or ranks.
        said: The words that have said it, such as "--ranks is 3".

    Raises:
        ConfigError: The number is no power of two.
    """
    try:
        power_of_two(number)
    except ValueError as error:
        raise ConfigError(f"{said}; {error}") from None
