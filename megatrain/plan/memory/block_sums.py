"""What a choice moves and updates, from sums over ranges of blocks: thousands of choices are cheap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from weakref import WeakKeyDictionary

from megatrain.config.choice import Choice
from megatrain.layout.host_buffers import DriveBuffers, largest_first, state_bytes
from megatrain.model.profile.anatomy import Anatomy, Fragment, Layer
from megatrain.plan.program.operations import BlockSize


@dataclass(frozen=True, slots=True)
class Block:
    """What streams as one under a choice."""

    size: BlockSize
    layer: int
    """-1: outside all layers."""
    num_split: int
    num_state: int
    num_scales: int
    """Of one moment in int8."""
    largest_run: int
    """State elements that AdamW updates in one go, at most."""
    share: float
    """Of its layer's work."""
    is_last: bool = True
    """Of its layer's blocks."""


def list_blocks(anatomy: Anatomy, choice: Choice) -> list[Block]:
    """List the blocks of a choice: of all layers in forward order, then the outer ones."""
    blocks = []
    for number, layer in enumerate(anatomy.layers):
        groups: Sequence[Sequence[Fragment]] = [layer.fragments]
        if choice.fragments:
            groups = [[fragment] for fragment in layer.fragments]
        is_resident = number < choice.resident_layers
        total = max(1, layer.num_params)
        for place, parts in enumerate(groups):
            share = sum(fragment.num_params for fragment in parts) / total
            block = _block(parts, number, share, is_streamed=not is_resident, on_device=is_resident)
            blocks.append(replace(block, is_last=place == len(groups) - 1))
    for part in anatomy.outer:
        blocks.append(_block([part], -1, 0.0, is_streamed=False, on_device=choice.outer_resident))
    return blocks


def _block(
    parts: Sequence[Fragment], layer: int, share: float, *, is_streamed: bool, on_device: bool
) -> Block:
    num_split, num_state = sum(p.num_split for p in parts), sum(p.num_state for p in parts)
    gradient = sum(p.gradient_bytes for p in parts)
    size = BlockSize(
        is_streamed=is_streamed,
        is_trained=num_state > 0,
        fetch_bytes=sum(p.working_bytes for p in parts),
        offload_bytes=gradient,
        accumulator_bytes=4 * num_state,
        update_bytes=26 * num_split + 28 * (num_state - num_split),
        updates_on_device=on_device,
    )
    largest_run = sum(p.largest_run for p in parts)  # at most: they may be neighbours
    num_scales = sum(p.num_scales for p in parts)
    return Block(size, layer, num_split, num_state, num_scales, largest_run, share)


class Sums:
    """Sums of one number per block over ranges of blocks."""

    def __init__(self, values: Iterable[int]) -> None:
        """Add them up once."""
        self._until = [0, *accumulate(values)]

    def __call__(self, start: int, stop: int) -> int:
        """Return the sum over `[start, stop)`; numbers outside the blocks are cut off."""
        last = len(self._until) - 1
        start, stop = min(max(start, 0), last), min(max(stop, 0), last)
        return self._until[stop] - self._until[start] if stop > start else 0


class BlockSums:
    """The blocks of a model, whole or in fragments: layers first, in forward order, then outer ones."""

    @classmethod
    def of(cls, anatomy: Anatomy, fragments: bool) -> BlockSums:
        """Return the block_sums of a model, made once."""
        known = _BLOCK_SUMS.setdefault(anatomy, {})
        if fragments not in known:
            known[fragments] = cls(anatomy, fragments)
        return known[fragments]

    def __init__(self, anatomy: Anatomy, fragments: bool) -> None:
        """Count the blocks of every layer."""
        counts = [len(layer.fragments) if fragments else 1 for layer in anatomy.layers]
        self.starts = [0, *accumulate(counts)]
        """First block of each layer, and the first outer block."""
        nothing = Choice(num_slots=1, num_gradient_buffers=1, activations=(), fragments=fragments)
        self.blocks = list_blocks(anatomy, nothing)
        self.fetch_bytes = Sums(b.size.fetch_bytes for b in self.blocks)
        self.gradient_bytes = Sums(b.size.offload_bytes for b in self.blocks)
        self.num_split = Sums(b.num_split for b in self.blocks)
        self.num_state = Sums(b.num_state for b in self.blocks)
        self.num_scales = Sums(b.num_scales for b in self.blocks)
        self.num_blocks = len(self.blocks)
        self._drive_bytes: dict[tuple[object, ...], tuple[int, int]] = {}
        self._samples: dict[int, list[tuple[int, bool]]] = {}
        self.placed: dict[tuple[object, ...], dict[str, int]] = {}
        """What `pools` has counted of a placement of blocks in RAM and on drives."""
        self.kinds = _kinds(anatomy.layers)
        """For each layer, the first one that is like it but for its name."""

    @property
    def first_outer(self) -> int:
        """Return the number of the first block outside all layers."""
        return self.starts[-1]

    def first_streamed(self, choice: Choice) -> int:
        """Return the number of the first block that streams."""
        return self.starts[choice.resident_layers]

    def largest(self, values: str, choice: Choice) -> int:
        """Return the largest `fetch_bytes`, `offload_bytes` or `num_state` of a streamed block."""
        return self._largest[values][self.first_streamed(choice)]

    @cached_property
    def _largest(self) -> dict[str, list[int]]:
        """For each number, the largest from each block to the last of the layers."""
        tables = {}
        for name in ("fetch_bytes", "offload_bytes", "num_state"):
            numbers = [
                block.num_state if name == "num_state" else getattr(block.size, name)
                for block in self.blocks[: self.first_outer]
            ]
            tables[name] = [*list(accumulate(reversed(numbers), max))[::-1], 0]
        return tables

    def largest_offloaded_gradient(self, choice: Choice) -> int:
        """Return the bytes of the largest gradient that the host uses: what a staging buffer holds."""
        outer = 0 if choice.outer_resident else self._largest_outer
        return max(self.largest("offload_bytes", choice), outer)

    @cached_property
    def _largest_outer(self) -> int:
        return max((block.size.offload_bytes for block in self.blocks[self.first_outer :]), default=0)

    def sample(self, choice: Choice) -> list[tuple[int, bool]]:
        """Return one block of every size there is among resident, streamed and outer ones.

        Returns:
            Its number, and whether it is outside all layers.
        """
        first = self.first_streamed(choice)
        if first in self._samples:
            return self._samples[first]
        sizes: dict[tuple[int, ...], int] = {}
        for number, size in enumerate(self._sizes):
            part = 2 if number >= self.first_outer else int(number >= first)
            sizes.setdefault((part, *size), number)
        self._samples[first] = [(number, key[0] == 2) for key, number in sizes.items()]
        return self._samples[first]

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        return [(block.num_split, block.largest_run) for block in self.blocks]

    def moved_bytes(self, choice: Choice, num_rounds: int) -> tuple[int, int]:
        """Return the bytes that a step fetches and offloads, activations apart.

        A round leaves in the slots the first blocks, with which the next round begins; a backward begins
        with the blocks that its forward has left there.
        """
        first, last = self.first_streamed(choice), self.first_outer
        total = self.fetch_bytes(first, last)
        held = self.fetch_bytes(first, min(first + choice.num_slots, last))
        turned = self.fetch_bytes(max(last - choice.num_slots, first), last)
        fetched = max(num_rounds * (2 * total - turned) - (num_rounds - 1) * held, total)
        loads = (num_rounds - 1) * 4 * self.num_state(first, last)
        offloaded = loads + self.gradient_bytes(first, last)
        fetched += loads
        if not choice.outer_resident:
            fetched += self.fetch_bytes(last, self.num_blocks)
            offloaded += self.gradient_bytes(last, self.num_blocks)
        return fetched, offloaded

    def updated_on_host(self, choice: Choice) -> tuple[int, int]:
        """Return how many split masters and how many fp32 masters the host updates."""
        first = self.first_streamed(choice)
        stop = self.first_outer if choice.outer_resident else self.num_blocks
        split, state = self.num_split(first, stop), self.num_state(first, stop)
        return split, state - split

    def scales_on_device(self, choice: Choice) -> int:
        """Return how many scales of one moment in int8 are on the device."""
        count = self.num_scales(0, self.first_streamed(choice))
        return count + (self.num_scales(self.first_outer, self.num_blocks) if choice.outer_resident else 0)

    def state_on_device(self, choice: Choice) -> int:
        """Return how many parameters the device updates."""
        state = self.num_state(0, self.first_streamed(choice))
        return state + (self.num_state(self.first_outer, self.num_blocks) if choice.outer_resident else 0)

    @cached_property
    def by_size(self) -> list[int]:
        """Return the blocks in the order in which RAM takes them: the largest first."""
        return largest_first([block.num_state for block in self.blocks])

    @cached_property
    def drive_buffers(self) -> DriveBuffers:
        """Return the sizes of the buffers before the drives."""
        blocks = [self.blocks[number] for number in self.by_size]
        state = [state_bytes(block.num_split, block.num_state) for block in blocks]
        return DriveBuffers(state, [block.size.fetch_bytes for block in blocks])

    @cached_property
    def rank(self) -> list[int]:
        """Return each block's place in that order."""
        ranks = [0] * self.num_blocks
        for place, block in enumerate(self.by_size):
            ranks[block] = place
        return ranks

    def is_state_on_drives(self, choice: Choice, block: int) -> bool:
        """Whether a block's remainder and moments are on drives."""
        return choice.tier("moments") == "nvme" and self.rank[block] >= choice.blocks_in_ram

    def is_working_on_drives(self, choice: Choice, block: int) -> bool:
        """Whether a block's weights are on drives."""
        return choice.tier("working") == "nvme" and self.rank[block] >= choice.weights_in_ram

    def drive_bytes(self, choice: Choice, num_rounds: int) -> tuple[int, int]:
        """Return the bytes that a step reads from the drives and writes to them, its commit included."""
        if choice.tier("moments") != "nvme":
            return 0, 0
        key = (choice.blocks_in_ram, choice.weights_in_ram, choice.tier("working"), num_rounds)
        if key not in self._drive_bytes:
            self._drive_bytes[key] = self._count_drive_bytes(choice, num_rounds)
        return self._drive_bytes[key]

    def _count_drive_bytes(self, choice: Choice, num_rounds: int) -> tuple[int, int]:
        read = written = 0
        for number, block in enumerate(self.blocks):
            state = 2 * block.num_split + 8 * block.num_state
            # a commit writes what is in RAM too, and the weights of all: so that it is whole
            written += block.size.fetch_bytes + state
            if self.is_state_on_drives(choice, number):
                read += state
            if self.is_working_on_drives(choice, number):
                read += (2 * num_rounds + 1) * block.size.fetch_bytes
        return read, written


def _kinds(layers: Sequence[Layer]) -> list[int]:
    first: dict[object, int] = {}
    kinds = []
    for number, layer in enumerate(layers):
        fragments = tuple(replace(fragment, name="") for fragment in layer.fragments)
        key = repr(replace(layer, fragments=fragments))
        kinds.append(first.setdefault(key, number))
    return kinds


_BLOCK_SUMS: WeakKeyDictionary[Anatomy, dict[bool, BlockSums]] = WeakKeyDictionary()
