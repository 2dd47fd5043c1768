"""Which blocks' state is in RAM and which on drives, decided before anything is allocated.

A fixed share of blocks is pinned in RAM. Every step passes all blocks in the same order, so a cache of the
least recently used ones would always have just dropped what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megatrain.errors import CapacityError
from megatrain.hardware import GIB, host_memory
from megatrain.layout.blocks import BlockLayout, aligned
from megatrain.layout.host_buffers import NUM_GRADIENT_STAGING, DriveBuffers, largest_first, state_bytes


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
    resumes: bool = False
    """Go on from what is committed on the drives; nothing is drawn or read from files."""

    @property
    def ram_bytes(self) -> int:
        """The limit in bytes."""
        return self.ram if self.ram is not None else int(0.9 * host_memory().available_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the planes of each block are."""

    state_on_drives: frozenset[int]
    """Blocks whose remainder and moments are on the drives."""
    working_on_drives: frozenset[int]
    """Those of them whose working weights are there too."""
    ram_bytes: Mapping[str, int]
    """Bytes in RAM by plane and buffer."""
    keeps_gradients: bool
    accumulates: bool

    def describe(self, num_blocks: int) -> str:
        """Return one line for the log."""
        return (
            f"state: remainder and moments of {len(self.state_on_drives)} of {num_blocks} blocks on drives, "
            f"weights of {len(self.working_on_drives)}; {sum(self.ram_bytes.values()) / GIB:.2f} GiB in RAM"
        )


def place(layouts: Sequence[BlockLayout], tiers: Tiers, *, is_split: bool, accumulates: bool) -> Placement:
    """Keep in RAM what fits: first all working weights, then the state of as many blocks as possible.

    Blocks are kept in the order of `largest_first`.

    Args:
        layouts: All blocks.
        tiers: The limit of RAM.
        is_split: Trained bf16 parameters have a remainder.
        accumulates: Several rounds add up in fp32.

    Raises:
        CapacityError: Not even the gradients and the buffers fit.
    """
    order = by_size(layouts)
    limit = tiers.ram_bytes
    takes = _Totals(layouts, order, tiers, is_split=is_split, accumulates=accumulates)
    counts = [(working, state) for working in range(len(order), -1, -1) for state in range(working, -1, -1)]
    found = next((pair for pair in counts if takes.total(*pair) <= limit), None)
    if found is None:
        least = takes.pools(*min(counts, key=lambda pair: takes.total(*pair)))
        parts = ", ".join(f"{pool} {size / GIB:.3f}" for pool, size in least.items() if size)
        advice = "use optim.updates=immediate, which keeps no gradients, or " if tiers.keeps_gradients else ""
        raise CapacityError(
            f"host memory: with all that can be on the drives, {sum(least.values()):,} bytes are needed in "
            f"RAM ({parts} GiB), but memory.tiers.ram is {limit:,} bytes; {advice}raise memory.tiers.ram"
        )
    return placed(layouts, tiers, *found, is_split=is_split, accumulates=accumulates)


def by_size(layouts: Sequence[BlockLayout]) -> list[int]:
    """Order blocks, the largest first, as they are kept in RAM."""
    return largest_first([layout.num_state for layout in layouts])


class _Totals:
    """What is in RAM if so many blocks of an order keep their weights there, and so many all of their state.

    Each total is a few additions: a plan for many blocks looks at all pairs of numbers.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        order: Sequence[int],
        tiers: Tiers,
        *,
        is_split: bool,
        accumulates: bool,
    ) -> None:
        ordered = [layouts[block] for block in order]
        self._working = list(accumulate((lay.working_bytes for lay in ordered), initial=0))
        self._remainder = list(
            accumulate((2 * lay.num_split if is_split else 0 for lay in ordered), initial=0)
        )
        self._moments = list(accumulate((8 * lay.num_state for lay in ordered), initial=0))
        self._buffers = DriveBuffers(
            [state_bytes(lay.num_split if is_split else 0, lay.num_state) for lay in ordered],
            [lay.working_bytes for lay in ordered],
        )
        gradients = [lay.gradient_bytes for lay in ordered]
        staged = NUM_GRADIENT_STAGING * max(map(aligned, gradients))
        sums = 4 * sum(lay.num_state for lay in ordered)
        self._fixed = {
            "gradient": sum(gradients) if tiers.keeps_gradients else staged,
            "accumulator": sums if accumulates and is_split else 0,
        }

    def pools(self, num_working: int, num_state: int) -> dict[str, int]:
        """Return the bytes by plane and buffer."""
        return {
            "working": self._working[num_working],
            "remainder": self._remainder[num_state],
            "moments": self._moments[num_state],
            **self._fixed,
            "drive_staging": self._buffers.staging_bytes(num_working, num_state),
            "pages": self._buffers.page_bytes(num_working),
        }

    def total(self, num_working: int, num_state: int) -> int:
        """Return the sum of `pools`."""
        return sum(self.pools(num_working, num_state).values())


def placed(
    layouts: Sequence[BlockLayout],
    tiers: Tiers,
    num_working: int,
    num_state: int,
    *,
    is_split: bool,
    accumulates: bool,
) -> Placement:
    """Keep in RAM the weights of the `num_working` largest blocks, and all of the `num_state` largest."""
    order = by_size(layouts)
    takes = _Totals(layouts, order, tiers, is_split=is_split, accumulates=accumulates)
    return Placement(
        state_on_drives=frozenset(order[num_state:]),
        working_on_drives=frozenset(order[num_working:]),
        ram_bytes=takes.pools(num_working, num_state),
        keeps_gradients=tiers.keeps_gradients,
        accumulates=accumulates,
    )
