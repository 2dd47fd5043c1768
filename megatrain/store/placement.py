"""Which blocks' state is in RAM and which on drives, decided before anything is allocated.

A fixed share of blocks is pinned in RAM. Every step passes all blocks in the same order, so a cache of the
least recently used ones would always have just dropped what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatrain.config.choice import Choice
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.runs import SumRoom
from megatrain.config.sizes import parse_bytes
from megatrain.errors import CapacityError, ConfigError
from megatrain.hardware import GIB, host_memory
from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.host_buffers import largest_first
from megatrain.layout.ownership import drive_totals, node_totals
from megatrain.layout.totals import BlockTotals, GradientPlaces
from megatrain.store.ranks import StateRanks

_ALL = 1 << 62
"""More blocks than any model has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """What a run may take for its state: RAM, and drives for the rest."""

    nvme: tuple[Path, ...]
    """Directories, one per drive."""
    ram: int | None = None
    """Bytes for the planes of state and the buffers before the drives; None: 90 % of what is available."""
    owner: str = ""
    """Whose state it is; state of another owner is neither read nor overwritten."""
    keeps_gradients: bool = True
    """Gradients wait for the norm in RAM. False: every one is used up at once (`updates=immediate`)."""
    gradients_in_ram: frozenset[int] | None = None
    """Blocks whose gradients do; None: all, if any are kept. `attach` and `load` set it from the choice."""
    gradients_staged: frozenset[int] | None = None
    """Blocks whose gradients pass through a few buffers in RAM; None: those that do not wait there."""
    sums_on_drives: frozenset[int] = frozenset()
    """Blocks whose sums of gradients wait on drives between rounds, and pass these buffers too."""
    resumes: bool = False
    """Go on from what is committed on the drives; nothing is drawn or read from files."""
    blocks_in_ram: int | None = None
    """Blocks, the largest first, whose state is in RAM, and their weights too; None: as many as fit."""
    weights_in_ram: int | None = None
    """Blocks whose weights are; None: as many as fit."""

    def __post_init__(self) -> None:
        """Take one directory or several, as paths or text, and a size like `64GiB`.

        Raises:
            ConfigError: No directory, no size, or numbers of blocks that there cannot be.
        """
        given = [self.nvme] if isinstance(self.nvme, (str, Path)) else self.nvme
        object.__setattr__(self, "nvme", tuple(map(Path, given)))
        if not self.nvme:
            raise ConfigError("Tiers(nvme=...) names no directory; name one on each drive")
        if self.ram is not None:
            object.__setattr__(self, "ram", parse_bytes(self.ram, "Tiers(ram=...)"))
        state, weights = self.blocks_in_ram, self.weights_in_ram
        for name, number in (("blocks_in_ram", state), ("weights_in_ram", weights)):
            if number is not None and (type(number) is not int or number < 0):
                raise ConfigError(f"{name} is {number!r}; use 0 or more, or None")
        if state is not None and weights is not None and state > weights:
            raise ConfigError(
                f"blocks_in_ram is {state} and weights_in_ram is {weights}, but the state of a block is in "
                f"RAM only where its weights are; use weights_in_ram={state} or more, or fewer blocks_in_ram"
            )

    @classmethod
    def check(cls, tiers: object) -> None:
        """Refuse what is neither None nor `Tiers`.

        Raises:
            ConfigError: The value is something else.
        """
        if tiers is not None and not isinstance(tiers, cls):
            raise ConfigError(
                f"tiers is {tiers!r}; use megatrain.Tiers(nvme=[DIRECTORY, ...], ram=BYTES or None)"
            )

    def of_node(self, node: int, num_nodes: int) -> tuple[Path, ...]:
        """Return a node's own directories, which are in `nvme` where there are several nodes."""
        return self.nvme if num_nodes == 1 else tuple(path / f"node-{node}" for path in self.nvme)

    def as_chosen(self, choice: Choice) -> Tiers:
        """Return the same with as many blocks in RAM as a choice says, if it puts planes on drives."""
        given = choice.given
        if not given.get("tiers") or "blocks_in_ram" not in given:
            return self
        pages = choice.tier("working") == "nvme"
        weights = choice.given.get("weights_in_ram") if pages else _ALL
        return replace(self, blocks_in_ram=choice.blocks_in_ram, weights_in_ram=weights)

    def with_state_in_ram(self) -> Tiers:
        """Return the same for drives that hold no state: gradients or saved activations wait there."""
        return replace(self, blocks_in_ram=_ALL, weights_in_ram=_ALL)

    @property
    def asked(self) -> Tiers:
        """Return what the caller has asked for, without what a choice has set."""
        return replace(
            self, blocks_in_ram=None, weights_in_ram=None, gradients_in_ram=None, gradients_staged=None
        )

    @property
    def ram_bytes(self) -> int:
        """The limit in bytes."""
        return self.ram if self.ram is not None else int(0.9 * host_memory().available_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the planes of each block are; without drives all of them are in RAM."""

    state_on_drives: frozenset[int] = frozenset()
    """Blocks whose remainder and optimizer state are on the drives."""
    working_on_drives: frozenset[int] = frozenset()
    """Those of them whose working weights are there too."""
    ram_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes in RAM by plane and buffer."""
    keeps_gradients: bool = True

    def describe(self, num_blocks: int) -> str:
        """Return one line for the log."""
        return (
            f"state: remainder and moments of {len(self.state_on_drives)} of {num_blocks} blocks on drives, "
            f"weights of {len(self.working_on_drives)}; {sum(self.ram_bytes.values()) / GIB:.2f} GiB in RAM"
        )


def place(
    layouts: Sequence[BlockLayout],
    tiers: Tiers,
    *,
    optimizer: Optimizer,
    sum_room: SumRoom,
    ranks: StateRanks,
) -> Placement:
    """Keep in RAM what `tiers` says, or what fits: first working weights, then the state of more blocks.

    Blocks are kept in the order of `largest_first`.

    Args:
        layouts: The layouts of all blocks.
        tiers: The limit of RAM, or the numbers of blocks.
        optimizer: The optimizer whose state it is.
        sum_room: The room for partial sums in fp32 that are kept between rounds, beside complete gradients.
        ranks: The ranks among whose nodes state is shared out.

    Raises:
        CapacityError: Not even the gradients and the buffers fit.
    """

    def numbers(given: int | None) -> Sequence[int]:
        return range(len(layouts), -1, -1) if given is None else [min(len(layouts), given)]

    pairs = [
        (working, state)
        for working in numbers(tiers.weights_in_ram)
        for state in numbers(tiers.blocks_in_ram)
        if state <= working
    ]
    takes = _Takes(layouts, tiers, optimizer, sum_room, ranks)
    if tiers.blocks_in_ram is not None and tiers.weights_in_ram is not None:
        return takes.placement(*pairs[0])
    limit = tiers.ram_bytes
    fits = {working: takes.least(working) <= limit for working in {pair[0] for pair in pairs}}
    found = next((pair for pair in pairs if fits[pair[0]] and takes.total(*pair) <= limit), None)
    if found is not None:
        return takes.placement(*found)
    least = takes.pools(*min(pairs, key=lambda pair: takes.total(*pair)))
    parts = ", ".join(f"{pool} {size / GIB:.3f}" for pool, size in least.items() if size)
    advice = "use optim.updates=immediate, which keeps no gradients, or " if tiers.keeps_gradients else ""
    raise CapacityError(
        f"host memory: with all that can be on the drives, {sum(least.values()):,} bytes are needed in "
        f"RAM ({parts} GiB), but memory.tiers.ram is {limit:,} bytes; {advice}raise memory.tiers.ram"
    )


def placed(
    layouts: Sequence[BlockLayout],
    tiers: Tiers,
    num_working: int,
    num_state: int,
    *,
    optimizer: Optimizer,
    sum_room: SumRoom,
    ranks: StateRanks,
) -> Placement:
    """Keep in RAM the weights of the `num_working` largest blocks, and all of the `num_state` largest."""
    return _Takes(layouts, tiers, optimizer, sum_room, ranks).placement(num_working, num_state)


class _Takes:
    """What is in RAM if so many of the largest blocks keep their weights there, and so many their state."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        tiers: Tiers,
        optimizer: Optimizer,
        sum_room: SumRoom,
        ranks: StateRanks,
    ) -> None:
        self._optimizer = optimizer
        self._keeps_gradients = tiers.keeps_gradients
        self._order = largest_first([layout.num_state for layout in layouts])
        by_number, everybody = BlockTotals(layout.sizes for layout in layouts), frozenset(range(len(layouts)))
        node_kept = node_totals(by_number.sizes, ranks.size, ranks.num_nodes, ranks.node)
        images = drive_totals(by_number.sizes, ranks.size, ranks.num_nodes)
        self._blocks, self._kept, self._images = (
            BlockTotals(totals.sizes[block] for block in self._order)
            for totals in (by_number, node_kept or by_number, images)
        )
        kept, staged = tiers.gradients_in_ram, tiers.gradients_staged
        if kept is None:
            kept = everybody if tiers.keeps_gradients else frozenset()
        nobody = by_number[:0]
        places = GradientPlaces(
            on_host=by_number.pick(sorted(kept)),
            on_device=nobody,
            on_drives=nobody,
            staged=by_number.pick(sorted(everybody - kept if staged is None else staged)),
            sums_on_drives=by_number.pick(sorted(tiers.sums_on_drives)),
        )
        self._gradients = pools.gradient_planes(self._blocks[:], places.kept_by(node_kept), room=sum_room)

    def placement(self, num_working: int, num_state: int) -> Placement:
        """Return where everything is."""
        return Placement(
            state_on_drives=frozenset(self._order[num_state:]),
            working_on_drives=frozenset(self._order[num_working:]),
            ram_bytes=self.pools(num_working, num_state),
            keeps_gradients=self._keeps_gradients,
        )

    def pools(self, num_working: int, num_state: int) -> dict[str, int]:
        """Return the bytes by plane and buffer."""
        weights, state = self._blocks[:num_working], self._kept[:num_state]
        planes = pools.state_planes(weights, state, self._optimizer)
        buffers = pools.drive_buffers(self._images, num_working, num_state, self._optimizer)
        return planes | self._gradients | buffers

    def total(self, num_working: int, num_state: int) -> int:
        """Return the sum of `pools`."""
        return sum(self.pools(num_working, num_state).values())

    def least(self, num_working: int) -> int:
        """Return what a total is at least, whatever the state takes."""
        return self._blocks[:num_working].total(pools.working_plane) + sum(self._gradients.values())
