"""The bytes that a choice moves and updates, by sums over ranges of blocks: a thousand choices are cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.runs import StepSums
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.exchange import Exchange
from megatrain.layout.expert_chunks import passing_order
from megatrain.layout.host_buffers import largest_first
from megatrain.layout.ownership import drive_totals, node_totals, piece_bytes, planned_share
from megatrain.layout.totals import BlockTotals, GradientPlaces, Residency, gradient_tiers
from megatrain.model.profile.anatomy import Anatomy, Layer
from megatrain.plan.memory.planned_blocks import PlannedBlock, list_blocks
from megatrain.plan.program.spec import DriveSpec, first_trained


class BlockSums:
    """The blocks of a model, whole or in fragments: layers first, in forward order, then outer ones."""

    @classmethod
    def of(cls, anatomy: Anatomy, choice: Choice) -> BlockSums:
        """Return the sums over the blocks of a model as a choice lets it come apart, made once."""
        anatomy, comes_apart = anatomy.as_split(choice), choice.comes_apart
        known = _BLOCK_SUMS.setdefault(anatomy, {})
        if comes_apart not in known:
            known[comes_apart] = cls(anatomy, choice)
        return known[comes_apart]

    def __init__(self, anatomy: Anatomy, choice: Choice) -> None:
        """Count the blocks of every layer."""
        counts = [len(layer.fragments) if choice.comes_apart else 1 for layer in anatomy.layers]
        self._outer = anatomy.outer
        self.starts = [0, *accumulate(counts)]
        """First block of each layer, and the first outer block."""
        split = Choice(fragments=choice.fragments, expert_chunks=choice.expert_chunks)
        self.blocks = list_blocks(anatomy, split.with_defaults(0), DEFAULT)
        self.num_chunks = [layer.num_chunks for layer in anatomy.layers]
        """The number of chunks into which the experts of each layer have come apart."""
        self.totals = BlockTotals(block.sizes for block in self.blocks)
        self.num_blocks = len(self.blocks)
        self.largest_numel = max((block.sizes.num_state for block in self.blocks), default=0)
        self._nodes: dict[tuple[int, int], tuple[BlockTotals | None, BlockTotals]] = {}
        self._ordered: dict[BlockTotals, BlockTotals] = {}
        self._drive_bytes: dict[tuple[object, ...], tuple[int, int]] = {}
        self._samples: dict[tuple[int, bool], list[tuple[int, bool]]] = {}
        self._gradients_of: dict[tuple[object, ...], tuple[tuple[str, ...], GradientPlaces]] = {}
        self._listed: dict[tuple[object, ...], list[PlannedBlock]] = {}
        self.placed: dict[tuple[object, ...], dict[str, int]] = {}
        """The results of `pools` for a placement of blocks in RAM and on drives."""
        self.runs: dict[tuple[object, ...], Any] = {}
        """The runs of the layers under choices that were looked at: see `layer_runs`."""
        self.kinds = _kinds(anatomy.layers)
        """The first layer that is like each but for its name."""

    def listed(
        self, anatomy: Anatomy, choice: Choice, optimizer: Optimizer, batch: StepBatch
    ) -> list[PlannedBlock]:
        """Return what `list_blocks` does, once for choices that leave the same blocks on the device."""
        key = (choice.resident_layers, choice.outer_resident, choice.outer_streams, optimizer, batch)
        if key not in self._listed:
            self._listed[key] = list_blocks(anatomy, choice, optimizer, batch)
        return self._listed[key]

    def kept_by_node(self, batch: StepBatch) -> BlockTotals | None:
        """Return the sizes of what the first node keeps of each block's state, as `node_totals`."""
        return self._of_nodes(batch)[0]

    def images(self, batch: StepBatch) -> BlockTotals:
        """Return the sizes of what a node has on its drives of each block, as `drive_totals`."""
        return self._of_nodes(batch)[1]

    def _of_nodes(self, batch: StepBatch) -> tuple[BlockTotals | None, BlockTotals]:
        key = batch.num_ranks, batch.num_nodes
        if key not in self._nodes:
            self._nodes[key] = node_totals(self.totals.sizes, *key), drive_totals(self.totals.sizes, *key)
        return self._nodes[key]

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the outer blocks that may stream: embeddings, and heads."""
        embeddings, heads = (
            tuple(
                self.first_outer + n
                for n, part in enumerate(self._outer)
                if part.may_stream and part.kind == kind
            )
            for kind in ("embedding", "head")
        )
        return embeddings, heads

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """Return the outer blocks that the model passes behind all layers."""
        return tuple(self.first_outer + n for n, part in enumerate(self._outer) if part.is_behind)

    def passed(self, layer: int) -> list[int]:
        """Return the blocks of a layer in the order in which its forward enters them."""
        start, stop = self.starts[layer : layer + 2]
        chunks = self.num_chunks[layer]
        places = passing_order(chunks, stop - start) if chunks else range(stop - start)
        return [start + place for place in places]

    @property
    def first_outer(self) -> int:
        """Return the number of the first block outside all layers."""
        return self.starts[-1]

    def first_streamed(self, choice: Choice) -> int:
        """Return the number of the first block that streams."""
        return self.starts[choice.resident_layers]

    def residency(self, choice: Choice) -> Residency:
        """Return which blocks stream, and which stay on the device."""
        first, outer = self.first_streamed(choice), self.first_outer
        resident = self.totals[:first]
        if choice.outer_streams:
            ends = {*self.ends[0], *self.ends[1]}
            return Residency(
                streamed=self.totals[first:outer] | self.totals.pick(sorted(ends)),
                resident=resident,
                weights_only=self.totals.pick(n for n in range(outer, self.num_blocks) if n not in ends),
            )
        return Residency(
            streamed=self.totals[first:outer],
            resident=resident | self.totals[outer:] if choice.outer_resident else resident,
            weights_only=self.totals[:0] if choice.outer_resident else self.totals[outer:],
        )

    def gradient_tiers(self, choice: Choice) -> tuple[str, ...]:
        """Return where each block's complete gradient waits for the norm."""
        return self._gradients(choice)[0]

    def gradient_places(self, choice: Choice, num_micro_batches: int) -> GradientPlaces:
        """Return which blocks' complete gradients wait where, in a step of so many micro-batches."""
        if choice.uses_gradients_up(num_micro_batches):
            return GradientPlaces.none(self.totals, self.residency(choice))
        places = self._gradients(choice)[1]
        if choice.sums_pass_buffers(num_micro_batches):
            residency, at_once = self.residency(choice), choice.updates == "immediate"
            return places.with_sums(choice.sums, residency, at_once=at_once)
        return places

    def _gradients(self, choice: Choice) -> tuple[tuple[str, ...], GradientPlaces]:
        key = (choice.gradients, choice.resident_layers, choice.outer_resident, choice.outer_streams)
        if key not in self._gradients_of:
            residency = self.residency(choice)
            layers = [range(*span) for span in pairwise(self.starts)]
            tiers = gradient_tiers(choice.gradients, layers, residency)
            self._gradients_of[key] = tiers, GradientPlaces.of(self.totals, residency, tiers)
        return self._gradients_of[key]

    def sample(self, choice: Choice) -> list[tuple[int, bool]]:
        """Return one block of every size there is among resident, streamed and outer ones.

        Returns:
            The number of each such block, and whether it is outside all layers.
        """
        first = self.first_streamed(choice)
        known = (first, choice.outer_streams)
        if known in self._samples:
            return self._samples[known]
        sizes: dict[tuple[int, ...], int] = {}
        for number, size in enumerate(self._sizes):
            is_outer = number >= self.first_outer and not self._streams_there(choice, number)
            part = 2 if is_outer else int(number >= first)
            sizes.setdefault((part, *size), number)
        self._samples[known] = [(number, key[0] == 2) for key, number in sizes.items()]
        return self._samples[known]

    def _streams_there(self, choice: Choice, number: int) -> bool:
        return choice.outer_streams and (number in self.ends[0] or number in self.ends[1])

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        return [(block.sizes.num_split, block.largest_run) for block in self.blocks]

    def moved_bytes(self, choice: Choice, step: StepSums, gathers_among: int = 1) -> tuple[int, int]:
        """Return the bytes that a step fetches and offloads, activations apart.

        Args:
            choice: The choice, in which nothing is open.
            step: The partial sums of the step, or of a rank's part of it.
            gathers_among: The number of ranks that fetch a piece of weights each, and gather them.
        """
        num_micro_batches, num_ranks = step.runs.num_micro_batches, step.num_ranks
        layers = self.totals[self.first_streamed(choice) : self.first_outer]
        num_rounds = choice.num_rounds(num_micro_batches)
        fetched = self.weights_fetched(choice, num_rounds, gathers_among)
        offloaded = self.residency(choice).on_host.total(offloaded_share, num_ranks)
        if choice.adds_on_host(num_micro_batches):
            later = num_micro_batches - choice.lockstep
            more = (later - 1) * layers.total(pools.gradient_plane)
            return fetched, offloaded + layers.total(pools.accumulator_plane) + more
        num_sums = sum(len(each.left) for each in step.by_round[:-1])
        if step.are_shared:
            loads = num_sums * layers.total(shared_sum, num_ranks, step.sequence)
        else:
            loads = num_sums * layers.total(pools.accumulator_plane)
        return fetched + loads, offloaded + loads

    def added_bytes(self, choice: Choice, num_micro_batches: int) -> int:
        """Return the bytes of host memory that adding up the gradients of layers there reads and writes."""
        if not choice.adds_on_host(num_micro_batches):
            return 0
        layers = self.totals[self.first_streamed(choice) : self.first_outer]
        before = num_micro_batches - choice.lockstep - 1
        return before * layers.total(_added, False) + layers.total(_added, True)

    def weights_fetched(self, choice: Choice, num_rounds: int, gathers_among: int = 1) -> int:
        """Return the bytes of weights that a step fetches.

        A round leaves in the slots the first blocks, with which the next round begins; a backward begins
        with the blocks that its forward has left there.
        """
        first, last = self.first_streamed(choice), self.first_outer
        total = self.totals[first:last].total(_fetched, gathers_among)
        ends = max(first, self.starts[self.first_trained])
        back = self.totals[ends:last].total(_fetched, gathers_among)
        if choice.expert_chunks > 1:  # the order of the state is not that of the visits
            largest = max(
                (_fetched(size, gathers_among) for size in self.totals.sizes[first:last]), default=0
            )
            held = turned = choice.num_slots * largest
        else:
            held = self.totals[first : min(first + choice.num_slots, last)].total(_fetched, gathers_among)
            turned = self.totals[max(last - choice.num_slots, ends) : last].total(_fetched, gathers_among)
        fetched = max(num_rounds * (total + back - turned) - (num_rounds - 1) * held, total)
        if not choice.outer_resident:
            fetched += self.totals[last:].total(_fetched, gathers_among)
        return fetched

    @cached_property
    def first_trained(self) -> int:
        """The layer with which backward ends."""
        layers = [self.passed(number) for number in range(len(self.num_chunks))]
        return first_trained([block.size.is_trained for block in self.blocks], layers, self.behind)

    @cached_property
    def by_size(self) -> list[int]:
        """Return the blocks in the order in which RAM takes them: the largest first."""
        return largest_first([block.sizes.num_state for block in self.blocks])

    def ordered(self, totals: BlockTotals) -> BlockTotals:
        """Return the sums over blocks, of which `totals` are sizes, in that order."""
        if totals not in self._ordered:
            self._ordered[totals] = BlockTotals(totals.sizes[number] for number in self.by_size)
        return self._ordered[totals]

    def drive_spec(
        self, choice: Choice, batch: StepBatch, optimizer: Optimizer = DEFAULT
    ) -> DriveSpec | None:
        """Return which blocks of a choice have state on drives, of the first rank; None: none has."""
        if choice.tier("moments") != "nvme":
            return None
        images, blocks = self.images(batch).sizes, range(self.num_blocks)
        return DriveSpec(
            state_bytes=[pools.state_image(image, optimizer) for image in images],
            working_bytes=[*map(pools.weights_image, images)],
            state=frozenset(n for n in blocks if self.is_state_on_drives(choice, n)),
            working=frozenset(n for n in blocks if self.is_working_on_drives(choice, n)),
            num_ranks=batch.ranks_of_node,
        )

    @cached_property
    def rank(self) -> list[int]:
        """Return each block's place in that order."""
        return sorted(range(self.num_blocks), key=self.by_size.__getitem__)

    def is_state_on_drives(self, choice: Choice, block: int) -> bool:
        """Return whether a block's remainder and optimizer state are on drives."""
        return choice.tier("moments") == "nvme" and self.rank[block] >= choice.blocks_in_ram

    def is_working_on_drives(self, choice: Choice, block: int) -> bool:
        """Return whether a block's weights are on drives."""
        return choice.tier("working") == "nvme" and self.rank[block] >= choice.weights_in_ram

    def drive_bytes(
        self,
        choice: Choice,
        num_rounds: int,
        batch: StepBatch,
        commit_every: int | None,
        optimizer: Optimizer,
    ) -> tuple[int, int]:
        """Return the bytes that a step reads from the drives, at least, and writes, its part of a commit too.

        Of several ranks, the first one does: its part of the state, and all of the weights that it fetches.
        """
        if choice.tier("moments") != "nvme":
            return 0, 0
        placed = choice.blocks_in_ram, choice.weights_in_ram, choice.tiers
        key = (placed, num_rounds, batch, commit_every, optimizer)
        if key not in self._drive_bytes:
            drives = self.drive_spec(choice, batch, optimizer)
            self._drive_bytes[key] = self._count_drive_bytes(choice, num_rounds, drives, commit_every)
        return self._drive_bytes[key]

    def _count_drive_bytes(
        self, choice: Choice, num_rounds: int, drives: DriveSpec | None, commit_every: int | None
    ) -> tuple[int, int]:
        assert drives is not None
        trained = [number for number, block in enumerate(self.blocks) if block.size.is_trained]
        there = sum(self.blocks[number].size.fetch_bytes for number in drives.working)
        elsewhere = sum(block.size.fetch_bytes for block in self.blocks) - there
        # of the weights that are fetched, those in RAM are at most twice in each round
        read = max(there, self.weights_fetched(choice, num_rounds) - 2 * num_rounds * elsewhere)
        return read + drives.written_bytes(trained, None), drives.written_bytes(trained, commit_every)


def _fetched(sizes: BlockBytes, gathers_among: int) -> int:
    gathered = (gathers_among - 1) * piece_bytes(sizes.kept_bytes, gathers_among)
    return sizes.kept_bytes - gathered


def offloaded_share(sizes: BlockBytes, num_ranks: int) -> int:
    """Return the bytes of a rank's share of a block's complete gradient."""
    return pools.gradient_plane(share_of(sizes, num_ranks))


def updated_share(sizes: BlockBytes, optimizer: Optimizer, num_ranks: int) -> int:
    """Return the bytes of memory that an update of a rank's share of a block reads and writes."""
    return share_of(sizes, num_ranks).update_bytes(optimizer)


def given_weights(sizes: BlockBytes, num_ranks: int) -> int:
    """Return the bytes of new weights of a resident block that a rank gives to all others."""
    return (num_ranks - 1) * share_of(sizes, num_ranks).working_bytes


def exchanged(sizes: BlockBytes, exchange: Exchange) -> int:
    """Return the bytes of a block's sum that go to other ranks."""
    return exchange.planned_bytes(sizes)


def shared_sum(sizes: BlockBytes, num_ranks: int, sequence: int) -> int:
    """Return the bytes of a rank's share of a block's sum, of each shard of rows."""
    return 4 * sequence * share_of(sizes, num_ranks).num_state


def share_of(sizes: BlockBytes, num_ranks: int) -> BlockBytes:
    """Return the sizes of what a plan counts as a rank's share of a block."""
    return sizes if num_ranks == 1 else planned_share(sizes, num_ranks).sizes


def _added(sizes: BlockBytes, completes: bool) -> int:
    return sizes.added_bytes(completes=completes)


def _kinds(layers: Sequence[Layer]) -> list[int]:
    first: list[tuple[Layer, int]] = []
    kinds = []
    for number, layer in enumerate(layers):
        fragments = tuple(replace(fragment, name="") for fragment in layer.fragments)
        bare = replace(layer, fragments=fragments)
        like = next((kind for known, kind in reversed(first) if known == bare), number)
        if like == number:
            first.append((bare, number))
        kinds.append(like)
    return kinds


_BLOCK_SUMS: WeakKeyDictionary[Anatomy, dict[bool, BlockSums]] = WeakKeyDictionary()
