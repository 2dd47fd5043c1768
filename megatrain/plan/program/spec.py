"""The facts that decide the program of a step: the blocks with their sizes, and a choice for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from megatrain.config.choice import Choice
from megatrain.layout.drive_chunks import first_turn, own_bytes
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.visits import Ends, LayerPlan, Round, Visit, layer_plans, most_open, round_visits


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveSpec:
    """The blocks that have state on drives, and the bytes of every block's image there."""

    state_bytes: Sequence[int]
    """The bytes of remainder and moments by block, in whole pages."""
    working_bytes: Sequence[int]
    """The bytes of working weights by block, in whole pages."""
    state: frozenset[int]
    """Blocks whose remainder and moments are there."""
    working: frozenset[int]
    """The blocks among them whose working weights are there too."""
    rank: int = field(default=0, repr=False)
    """The number of this rank; it is left out where ranks compare their programs."""
    num_ranks: int = 1
    """The number of ranks that move the images together."""

    def update_bytes(self, block: int) -> int:
        """Return the bytes that this rank moves each way when a block with state on the drives is updated."""
        working = self.working_bytes[block] if block in self.working else 0
        return self.piece_bytes(block, self.state_bytes[block]) + self.piece_bytes(block, working)

    def written_bytes(self, trained: Collection[int], commit_every: int | None) -> int:
        """Return the bytes that this rank writes in a step; without commits, as many as it reads for updates.

        Args:
            trained: The blocks that are updated.
            commit_every: The number of steps between commits, of which each has its part; None: there are
                none.
        """
        written = sum(self.update_bytes(block) for block in trained if block in self.state)
        if commit_every is not None:  # one writes what is in RAM too, weights as well: so that it is whole
            images = ((self.state_bytes, self.state), (self.working_bytes, self.working))
            in_ram = ((n, nbytes[n]) for nbytes, there in images for n in trained if n not in there)
            written += sum(self.piece_bytes(n, nbytes) // commit_every for n, nbytes in in_ram)
        return written

    def piece_bytes(self, block: int, nbytes: int, start: int = 0) -> int:
        """Return how many bytes this rank moves of so many, from `start` on in a part of a block's image."""
        return own_bytes(nbytes, first_turn(block, start), self.rank, self.num_ranks)


def first_trained(
    is_trained: Sequence[bool], layers: Sequence[Sequence[int]], behind: Collection[int]
) -> int:
    """Return the layer with which backward ends: nothing before it is trained.

    Args:
        is_trained: Whether something of each block is trained.
        layers: The blocks of each decoder layer.
        behind: The outer blocks that the model passes behind all layers.
    """
    elsewhere = {*behind, *(block for layer in layers for block in layer)}
    if any(here for block, here in enumerate(is_trained) if block not in elsewhere):
        return 0  # the embedding: backward goes through all layers
    return next((n for n, layer in enumerate(layers) if any(is_trained[block] for block in layer)), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """The specification from which a step's program follows: the blocks, and a choice for them."""

    sizes: Sequence[BlockSize]
    layers: Sequence[LayerPlan]
    """The layers in forward order."""
    num_slots: int
    num_gradient_buffers: int
    updates: str = "deferred"
    """The schedule of the updates: `deferred`, `immediate` or `serial`."""
    tiers: Sequence[str] = ()
    """The place, by block, where its complete gradient waits for the norm: `host`, `device` or `nvme`; empty:
    all wait on the host."""
    sums: str = "device"
    """The place where gradients of several rounds add up, or wait in between: see `Choice.sums`."""
    clips: bool = True
    splits: bool = True
    """Weights are bf16, the upper halves of fp32 masters: sums are wider than complete gradients."""
    num_runs: int = 1
    """Runs of the step; see `Runs`."""
    num_ranks: int = 1
    """Ranks that train together, each with a share of every block's state."""
    gathers: bool = False
    """Each fetches a piece of every block's weights, and they gather them."""
    first_trained: int = 0
    """The first layer that backward reaches."""
    activations_on_drives: bool = False
    drives: DriveSpec | None = None
    ends: Ends = field(default_factory=Ends)
    """Blocks in no layer that stream."""
    behind: tuple[int, ...] = ()
    """Blocks in no layer that the model passes behind all layers."""
    heads_in_turn: bool = True
    """The backward of each micro-batch's head follows its forward. False: the loss reaches layers by another
    way than through the last one's output."""
    outer: tuple[int, ...] = field(init=False)
    """Blocks in no layer that stay on the device."""

    @classmethod
    def of(
        cls,
        choice: Choice,
        sizes: Sequence[BlockSize],
        layers: Sequence[Sequence[int]],
        *,
        ends: tuple[Sequence[int], Sequence[int]] = ((), ()),
        behind: Collection[int] = (),
        saved: Sequence[tuple[int, int]] | None = None,
        num_chunks: Sequence[int] | None = None,
    ) -> StepSpec:
        """Say how a choice runs; what does not follow from it is as in a model of bf16 in RAM, on one rank.

        Args:
            choice: The choice, in which nothing is open.
            sizes: The sizes of the blocks under it.
            layers: The blocks of each decoder layer.
            ends: The outer blocks that may stream: embeddings, and heads.
            behind: The outer blocks that the model passes behind all layers.
            saved: The bytes that each layer saves to the host; see `layer_plans`.
            num_chunks: The number of chunks of each layer's experts; None: none come apart.
        """
        return cls(
            sizes=sizes,
            layers=layer_plans(choice.policies, layers, choice.boundaries, saved, num_chunks),
            num_slots=choice.num_slots,
            num_gradient_buffers=choice.num_gradient_buffers,
            updates=choice.updates,
            sums=choice.sums,
            ends=_ends(ends, sizes),
            behind=tuple(behind),
            first_trained=first_trained([size.is_trained for size in sizes], layers, behind),
            activations_on_drives=choice.boundaries == "nvme",
        )

    def __post_init__(self) -> None:
        """Find the outer blocks."""
        inner = {block for layer in self.layers for block in layer.blocks}
        inner |= {*self.ends.embeddings, *self.ends.heads}
        outer = tuple(block for block in range(len(self.sizes)) if block not in inner)
        object.__setattr__(self, "outer", outer)

    def tier(self, block: int, *, completes: bool = True) -> str:
        """Return where a block's gradient goes when it leaves its buffer.

        Args:
            block: The number of the block.
            completes: Whether the gradient is complete. False: it is a sum that goes on adding up in a later
                round. Those may all wait on drives. If not, one in fp32 waits where it will be complete: it
                takes no more room there. Others are wider, and the host keeps them.
        """
        if self.sums == "nvme" and not completes:
            return "nvme"
        if not self.tiers or (self.keeps_wide_sums and not completes):
            return "host"
        return self.tiers[block]

    @property
    def keeps_wide_sums(self) -> bool:
        """Return whether what adds up over rounds is kept apart from complete gradients, and on the host."""
        return self.splits or self.num_runs > 1 or self.num_ranks > 1

    @property
    def is_immediate(self) -> bool:
        """Return whether a block is updated as soon as its gradient is complete."""
        return self.updates == "immediate"

    @property
    def num_backwards(self) -> int:
        """Return the number of backward visits of one micro-batch."""
        inside = sum(len(layer.blocks) for layer in self.layers[self.first_trained :])
        outside = (*self.outer, *self.ends.embeddings)
        return inside + sum(self.sizes[block].is_trained for block in outside) + len(self.ends.heads)

    @property
    def has_shares(self) -> bool:
        """Return whether several ranks update a share of each block."""
        return self.num_ranks > 1

    def visits(self, round_: Round) -> list[Visit]:
        """List the visits of a round."""
        return round_visits(
            self.layers,
            round_,
            outer=self.outer,
            behind=[block for block in self.outer if block in self.behind],
            ends=self.ends,
            first_trained=self.first_trained,
        )

    def has_buffers(self, visits: Sequence[Visit]) -> bool:
        """Return whether there are gradient buffers for all that adds up at once in a round's visits."""
        sizes = self.sizes
        own = [v for v in visits if v.block >= 0 and sizes[v.block].is_trained and sizes[v.block].is_streamed]
        return most_open(self.with_sums(own)) <= self.num_gradient_buffers

    def with_sums(self, visits: Sequence[Visit]) -> list[Visit]:
        """Say of each visit whether the host adds its gradient to those of earlier rounds.

        That of a head comes in parts, one after the other to the same sum, so it adds up on the device.
        """

        def is_added(visit: Visit) -> bool:
            size = self.sizes[visit.block]
            return visit.loads and not visit.is_head and size.is_trained and size.is_streamed

        if self.sums != "host":
            return list(visits)
        return [
            replace(v, sums_on_host=True, adds=False, is_last=True, completes=v.completes and v.is_last)
            if is_added(v)
            else v
            for v in visits
        ]


def _ends(blocks: tuple[Sequence[int], Sequence[int]], sizes: Sequence[BlockSize]) -> Ends:
    embeddings, heads = (tuple(b for b in found if sizes[b].is_streamed) for found in blocks)
    return Ends(embeddings, heads, tuple(block for block in embeddings if sizes[block].is_trained))
