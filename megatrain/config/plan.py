"""A plan: a choice, with what it takes and how fast it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.config.choice import Choice, StepBatch

_DEVICE_POOLS = ("slots", "gradient buffers", "waiting gradients", "resident")
"""How the names of pools begin that the device allocates; on a CPU they are in RAM, as state is."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Bytes of one kind in one tier."""

    tier: str
    """`device`, `ram` or `nvme`."""
    name: str
    nbytes: int
    is_exact: bool = True
    """Allocated as such; otherwise a peak that comes and goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A choice with what it takes and how fast it is."""

    choice: Choice
    batch: StepBatch
    fits: bool
    problem: str
    """Empty if it fits; otherwise the pool, the need, the limit, and the option that fits: one sentence."""
    pools: tuple[Pool, ...]
    limits: Mapping[str, int]
    """Bytes by tier."""
    step_s: float
    bound: str
    """What the step takes longest for: `compute`, `copies to the device`, `copies to the host`, `optimizer`,
    `backward + optimizer`, `drive reads`, `drive writes`, `caller`."""
    bounds_s: Mapping[str, float]
    """Seconds below which no order can be, by cause."""
    tokens_per_s: float
    """Of all ranks together."""
    mfu: float
    """Model FLOP/s over the machine's measured matrix products, of one device."""
    hardware_mfu: float
    """With recomputation."""
    bytes_per_step: Mapping[str, int]
    """Of a rank: `fetched`, `offloaded`, `saved`, `restored`, `updated`, `drive_read`, `drive_written`, and
    what ranks get of others or send them: `gathered`, `exchanged`, `spread`."""
    num_evaluated: int
    """Choices that the search has timed."""
    together: int
    """Micro-batches that pass together without gradients, as in an evaluation, in the memory of a step."""
    pass_s: float
    """Seconds of so many."""
    pass_bytes: int
    """Bytes that they fetch: all streamed blocks once."""
    plan_s: float
    is_cut_short: bool = False
    """The search ended with its budget: a choice that was not timed may be faster."""

    @property
    def device_pool_bytes(self) -> int:
        """Bytes that the device's lanes allocate for good."""
        return sum(p.nbytes for p in self.pools if p.is_exact and p.name.startswith(_DEVICE_POOLS))

    @property
    def host_planes(self) -> dict[str, int]:
        """Bytes of each plane of state in RAM, and of the buffers before drives."""
        in_ram = (pool for pool in self.pools if pool.is_exact and pool.tier == "ram")
        return {pool.name: pool.nbytes for pool in in_ram if not pool.name.startswith(_DEVICE_POOLS)}

    @property
    def host_plane_bytes(self) -> int:
        """Bytes of all of these."""
        return sum(self.host_planes.values())

    @property
    def tokens_together(self) -> int:
        """Tokens that pass together without gradients."""
        return self.together * self.batch.micro_batch_size * self.batch.seq_len // self.batch.sequence

    def tier_bytes(self, tier: str) -> int:
        """Return the bytes of all pools of a tier."""
        return sum(pool.nbytes for pool in self.pools if pool.tier == tier)
