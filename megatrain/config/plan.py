"""A plan: a choice with its memory and its speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.config.choice import Choice, StepBatch

_DEVICE_POOLS = ("slots", "codes", "gradient buffers", "waiting gradients", "resident")
"""The beginnings of the names of pools that the device allocates; on a CPU they are in RAM, as state is."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Bytes of one kind in one tier."""

    tier: str
    """The tier: `device`, `ram` or `nvme`."""
    name: str
    nbytes: int
    is_exact: bool = True
    """Whether it is allocated as such; otherwise it is a peak that comes and goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A choice with its memory and its speed."""

    choice: Choice
    batch: StepBatch
    fits: bool
    problem: str
    """The sentence why it does not fit: the pool, the need, the limit, the option that fits; else empty."""
    pools: tuple[Pool, ...]
    limits: Mapping[str, int]
    """The limits in bytes, by tier."""
    step_s: float
    bound: str
    """The bound of the step: `compute`, `copies to the device`, `copies to the host`, `optimizer`, `backward
    + optimizer`, `drive reads`, `drive writes`, `caller`."""
    bounds_s: Mapping[str, float]
    """The seconds below which no order can be, by cause."""
    tokens_per_s: float
    """The tokens per second of all ranks together."""
    mfu: float
    """The model FLOP/s over the machine's measured matrix products, of one device."""
    hardware_mfu: float
    """The same share with recomputation counted."""
    bytes_per_step: Mapping[str, int]
    """The bytes of a rank: `fetched`, `offloaded`, `saved`, `restored`, `updated`, `drive_read`,
    `drive_written`, and what ranks get of others or send them: `gathered`, `exchanged`, `spread`."""
    num_evaluated: int
    """The number of choices that the search has timed."""
    together: int
    """The number of micro-batches that pass together without gradients in the memory of a step."""
    pass_s: float
    """The seconds of such a pass."""
    pass_bytes: int
    """The bytes that such a pass fetches: all streamed blocks once."""
    plan_s: float
    is_cut_short: bool = False
    """Whether the search ended with its budget, so that a choice that was not timed may be faster."""

    @property
    def device_pool_bytes(self) -> int:
        """Return the bytes that the device's lanes allocate for good."""
        return sum(p.nbytes for p in self.pools if p.is_exact and p.name.startswith(_DEVICE_POOLS))

    @property
    def host_planes(self) -> dict[str, int]:
        """Return the bytes of each plane of state in RAM, and of the buffers before drives."""
        in_ram = (pool for pool in self.pools if pool.is_exact and pool.tier == "ram")
        return {pool.name: pool.nbytes for pool in in_ram if not pool.name.startswith(_DEVICE_POOLS)}

    @property
    def host_plane_bytes(self) -> int:
        """Return the bytes of all of these."""
        return sum(self.host_planes.values())

    @property
    def tokens_together(self) -> int:
        """Return the number of tokens that pass together without gradients."""
        return self.together * self.batch.micro_batch_size * self.batch.seq_len // self.batch.sequence

    @property
    def drive_written_bytes(self) -> int:
        """Return the bytes that a step writes to the drives of a node, all of its ranks together."""
        return self.batch.ranks_of_node * self.bytes_per_step.get("drive_written", 0)

    def tier_bytes(self, tier: str) -> int:
        """Return the bytes of all pools of a tier."""
        return sum(pool.nbytes for pool in self.pools if pool.tier == tier)
