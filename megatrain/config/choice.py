"""What can be chosen about where a step's bytes are and when they move: no choice changes the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BOUNDARIES = ("device", "host", "nvme")
"""Where the inputs of recomputed layers can wait for their backward."""

_DEVICE_POOLS = ("slots", "gradient buffers", "waiting gradients", "resident")
"""How the names of pools begin that the device allocates; on a CPU they are in RAM, as state is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to run a step: the settings of `memory` and `optim.updates`, with no `auto` left."""

    num_slots: int
    num_gradient_buffers: int
    activations: tuple[str, ...]
    """One policy per decoder layer."""
    boundaries: str = "device"
    """`device`, `host` or `nvme`. With `nvme`, what `offload` saves goes to the drives too."""
    fragments: bool = False
    resident_layers: int = 0
    """First layers that stay on the device with all their state."""
    outer_resident: bool = False
    """Whether embedding, head and the like keep their optimizer state on the device too."""
    lockstep: int = 1
    """Micro-batches of a round."""
    updates: str = "deferred"
    gradients: str = "host"
    """Where complete gradients wait for the norm: `host` or `device`."""
    tiers: frozenset[tuple[str, str]] = frozenset()
    """Pairs of a plane and `ram` or `nvme`; a plane that is not named is in RAM."""
    blocks_in_ram: int = 0
    """With planes on drives: blocks, the largest first, whose state is in RAM all the same."""
    weights_in_ram: int = 0
    """With `working` on drives: blocks, the largest first, whose weights are in RAM all the same."""
    head_chunk_tokens: int | None = None

    def tier(self, plane: str) -> str:
        """Return where a plane is: `ram` or `nvme`."""
        return dict(self.tiers).get(plane, "ram")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What a step trains on."""

    micro_batch_size: int
    """Rows."""
    seq_len: int
    num_micro_batches: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batch_size * self.seq_len * self.num_micro_batches


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
    mfu: float
    """Model FLOP/s over the machine's measured matrix products."""
    hardware_mfu: float
    """With recomputation."""
    bytes_per_step: Mapping[str, int]
    """`fetched`, `offloaded`, `saved`, `restored`, `updated`, `drive_read`, `drive_written`."""
    num_evaluated: int
    """Choices that the search has timed."""
    plan_s: float

    @property
    def device_pool_bytes(self) -> int:
        """Bytes that the device's lanes allocate for good."""
        return sum(p.nbytes for p in self.pools if p.is_exact and p.name.startswith(_DEVICE_POOLS))

    @property
    def host_plane_bytes(self) -> int:
        """Bytes of the planes of state in RAM, and of the buffers before drives."""
        in_ram = (pool for pool in self.pools if pool.is_exact and pool.tier == "ram")
        return sum(pool.nbytes for pool in in_ram if not pool.name.startswith(_DEVICE_POOLS))

    def tier_bytes(self, tier: str) -> int:
        """Return the bytes of all pools of a tier."""
        return sum(pool.nbytes for pool in self.pools if pool.tier == tier)
