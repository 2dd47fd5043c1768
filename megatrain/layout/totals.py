"""Bytes of many blocks: one function of a block's sizes, added up over ranges of blocks or at its largest.

Each function is added up once for all blocks, so that a plan can look at thousands of choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatrain.layout.block_bytes import BlockBytes


class BlockTotals:
    """The sizes of blocks in some order."""

    def __init__(self, sizes: Iterable[BlockBytes]) -> None:
        """Take them; nothing is added up yet."""
        self.sizes = tuple(sizes)
        self._values: dict[Hashable, list[int]] = {}
        self._until: dict[Hashable, list[int]] = {}
        self._largest: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.sizes)

    def __getitem__(self, part: slice) -> Selection:
        """Return a range of the blocks."""
        start, stop, _ = part.indices(len(self))
        return Selection(self, ((start, stop),))

    def pick(self, blocks: Iterable[int]) -> Selection:
        """Return some blocks by their numbers."""
        ranges: list[tuple[int, int]] = []
        for block in blocks:
            if ranges and ranges[-1][1] == block:
                ranges[-1] = (ranges[-1][0], block + 1)
            else:
                ranges.append((block, block + 1))
        return Selection(self, tuple(ranges))

    def total(self, of: Callable[..., int], args: tuple[Hashable, ...], start: int, stop: int) -> int:
        """Return the sum of `of(sizes, *args)` over `[start, stop)`."""
        until = self._until.get((of, args))
        if until is None:
            until = self._until[of, args] = [0, *accumulate(self._of(of, args))]
        return until[stop] - until[start] if stop > start else 0

    def largest(self, of: Callable[..., int], args: tuple[Hashable, ...], start: int, stop: int) -> int:
        """Return the largest value over `[start, stop)`, or 0."""
        key = of, args, start, stop
        if key not in self._largest:
            self._largest[key] = max(self._of(of, args)[start:stop], default=0)
        return self._largest[key]

    def _of(self, of: Callable[..., int], args: tuple[Hashable, ...]) -> list[int]:
        if (of, args) not in self._values:
            self._values[of, args] = [of(sizes, *args) for sizes in self.sizes]
        return self._values[of, args]


class Selection:
    """Some of the blocks."""

    __slots__ = ("_ranges", "_totals")

    def __init__(self, totals: BlockTotals, ranges: tuple[tuple[int, int], ...]) -> None:
        """Select `[start, stop)` of each range."""
        self._totals = totals
        self._ranges = ranges

    def __bool__(self) -> bool:
        """Return whether there is any block."""
        return any(start < stop for start, stop in self._ranges)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the blocks."""
        for start, stop in self._ranges:
            yield from range(start, stop)

    def __or__(self, other: Selection) -> Selection:
        """Return the blocks of both, which have none in common."""
        return Selection(self._totals, self._ranges + other._ranges)

    def without(self, blocks: Collection[int]) -> Selection:
        """Return those that are none of `blocks`."""
        return self._totals.pick(block for block in self if block not in blocks) if blocks else self

    def total(self, of: Callable[..., int], *args: Hashable) -> int:
        """Return the sum of `of(sizes, *args)` over the blocks."""
        return sum(self._totals.total(of, args, start, stop) for start, stop in self._ranges)

    def largest(self, of: Callable[..., int], *args: Hashable) -> int:
        """Return the largest value of a block; 0 if there is none."""
        return max((self._totals.largest(of, args, start, stop) for start, stop in self._ranges), default=0)


@dataclass(frozen=True, slots=True)
class Residency:
    """The blocks by what of them stays on the device. Every block is in one of the three parts."""

    streamed: Selection
    """Blocks whose weights are there for a visit at a time."""
    resident: Selection
    """Blocks of which everything stays there: they are updated there."""
    weights_only: Selection
    """Blocks whose weights stay there, and which the host updates."""

    @classmethod
    def of(
        cls, sizes: Iterable[BlockBytes], is_streamed: Sequence[bool], residents: Collection[int]
    ) -> Residency:
        """Sort blocks by what of them stays on the device.

        Args:
            sizes: The sizes of all blocks.
            is_streamed: A flag for each block, whether it streams unless it is resident.
            residents: The numbers of the blocks of which everything stays.
        """
        totals = BlockTotals(sizes)
        others = [number for number in range(len(totals)) if number not in residents]
        return cls(
            streamed=totals.pick(number for number in others if is_streamed[number]),
            resident=totals.pick(sorted(residents)),
            weights_only=totals.pick(number for number in others if not is_streamed[number]),
        )

    @property
    def staying(self) -> Selection:
        """Return the blocks whose weights stay on the device."""
        return self.resident | self.weights_only

    @property
    def on_host(self) -> Selection:
        """Return the blocks that the host updates."""
        return self.streamed | self.weights_only

    @property
    def all(self) -> Selection:
        """Return every block."""
        return self.streamed | self.staying


def gradient_tiers(
    places: Sequence[str], layers: Sequence[Sequence[int]], residency: Residency
) -> tuple[str, ...]:
    """Return where each block's complete gradient waits for the norm: `host`, `device` or `nvme`.

    Where all wait on the host, those of blocks that stay on the device do too. Otherwise these wait where
    they add up, which takes no room.

    Args:
        places: The places where complete gradients of streamed blocks wait, one for each decoder layer.
        layers: The numbers of the blocks of each decoder layer.
        residency: The blocks that stream, and those that stay on the device.
    """
    if all(place == "host" for place in places):
        return ("host",) * sum(1 for _ in residency.all)
    tiers = dict.fromkeys(residency.all, "device")
    streamed = set(residency.streamed)
    tiers |= dict.fromkeys(streamed, "host" if "host" in places else places[-1])  # outer ones
    for place, blocks in zip(places, layers, strict=True):
        tiers |= {block: place for block in blocks if block in streamed}
    return tuple(tiers[block] for block in sorted(tiers))


@dataclass(frozen=True, slots=True)
class GradientPlaces:
    """The places where complete gradients wait for the norm, each with its blocks."""

    on_host: Selection
    """Blocks whose gradients wait in the gradient plane in RAM."""
    on_device: Selection
    """Blocks that stream, in places of their own on the device."""
    on_drives: Selection
    staged: Selection
    """Blocks whose gradients pass a few host buffers on their way to an update, or to the sum of a step."""
    sums_on_drives: Selection
    """Blocks whose sums wait there between rounds, and pass these buffers on their way there and back."""

    @classmethod
    def of(cls, sizes: BlockTotals, residency: Residency, tiers: Sequence[str]) -> GradientPlaces:
        """Sort blocks by their tiers."""
        streamed, updated = set(residency.streamed), set(residency.on_host)

        def at(tier: str, among: Collection[int]) -> Selection:
            return sizes.pick(block for block, found in enumerate(tiers) if found == tier and block in among)

        return cls(
            on_host=at("host", range(len(sizes))),
            on_device=at("device", streamed),
            on_drives=at("nvme", streamed),
            staged=sizes.pick(block for block in sorted(updated) if tiers[block] != "host"),
            sums_on_drives=sizes[:0],
        )

    def with_sums(self, where: str, residency: Residency, *, at_once: bool) -> GradientPlaces:
        """Return the same places with those of sums, for steps of several rounds.

        Args:
            where: The place where the gradients of several rounds add up or wait. Those that add up on the
                `host` come to it through staging buffers, and so do sums to drives (`nvme`), where they wait
                between rounds; those on the `device` pass none.
            residency: The blocks that stream, and those that stay on the device.
            at_once: Whether updates follow at once: in a step of one round, the gradients of all blocks then
                pass through those buffers to their updates.
        """
        if where == "nvme":
            return replace(self, sums_on_drives=residency.streamed)
        if where == "host":
            return replace(self, staged=residency.on_host if at_once else residency.streamed)
        return self

    def kept_by(self, node: BlockTotals | None) -> GradientPlaces:
        """Return the same for a node that keeps parts of these sizes of the blocks; None: all of each."""
        return self if node is None else replace(self, on_host=node.pick(self.on_host))

    @classmethod
    def none(cls, sizes: BlockTotals, residency: Residency) -> GradientPlaces:
        """Sort blocks whose gradients wait nowhere: updates use them up as they come."""
        nobody = sizes[:0]
        return cls(nobody, nobody, nobody, staged=residency.on_host, sums_on_drives=nobody)
