"""What the operations of a training step cost: models, machines, and tasks for the emulated lanes.

Model of work, for a block of P parameters and t tokens: a forward is 2 P t FLOPs plus causal attention at
half, 2 S D t for sequences of S tokens; a backward is twice that; recomputation is one more forward. A copy
is its bytes. An update is the bytes of host memory that it reads and writes. Passes over device memory are
bytes over the datasheet's peak, so nobody's are overcharged, and occupy compute for that long.

Not modelled: DMA reads and writes host memory too (a fetch and an offload are 2 bytes per parameter each,
beside 26 of an update), kernels that run faster or slower at other shapes, and the launching thread's time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megatrain.plan.program.operations import Buffer, Lane

UPDATE_BYTES = 26
"""Host memory that AdamW reads (14) and writes (12) per parameter: megatrain/optim/adamw.py."""
DEVICE_STATE_BYTES = 16
"""Per parameter of an outer part that stays on the device: 2 + 2 master, 8 moments, 4 gradient."""
HBM_BYTES_PER_S = {"rtx4090": 1.008e12, "h100": 3.35e12, "gh200": 4.0e12}
"""Datasheet peaks by the first part of a machine's name: the machine file has no rate for device memory."""


class Task(NamedTuple):
    """One operation of a program, with everything that the lanes need to know of it."""

    lane: Lane
    work: float
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A dense decoder with grouped-query attention and a gated MLP."""

    name: str
    num_blocks: int
    hidden: int = 4096
    intermediate: int = 14336
    kv_dim: int = 1024
    vocab: int = 128256

    @property
    def block_params(self) -> int:
        """Parameters of one decoder block; biases are left out."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_dim + 3 * self.intermediate + 2)

    @property
    def part_params(self) -> int:
        """Parameters of the embedding, and of the head, which are not tied."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """All parameters."""
        return self.num_blocks * self.block_params + 2 * self.part_params

    def kept_bytes(self, *, whole: bool) -> int:
        """Bytes per token that a block keeps for backward.

        Args:
            whole: Everything that autograd saves; otherwise the outputs of matmuls and attention, from which
                norms and activation functions are made again.
        """
        if whole:
            return 2 * (6 * self.hidden + 2 * self.kv_dim + 4 * self.intermediate)
        return 2 * (3 * self.hidden + 2 * self.kv_dim + 2 * self.intermediate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """A machine: what a trainer achieves on it."""

    name: str
    compute_flops_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    host_bytes_per_s: float
    device_bytes: float

    @property
    def hbm_bytes_per_s(self) -> float:
        """Peak of device memory."""
        return HBM_BYTES_PER_S.get(self.name.split("-")[0], HBM_BYTES_PER_S["h100"])

    def rate(self, lane: Lane) -> float:
        """Work per second of a lane."""
        return {
            Lane.COMPUTE: self.compute_flops_per_s,
            Lane.FETCH: self.h2d_bytes_per_s,
            Lane.RESTORE: self.h2d_bytes_per_s,
            Lane.OFFLOAD: self.d2h_bytes_per_s,
            Lane.SAVE: self.d2h_bytes_per_s,
            Lane.HOST: self.host_bytes_per_s,
        }[lane]

    def mapping(self) -> dict[str, float]:
        """Return what a machine file says of it."""
        return {name: value for name, value in asdict(self).items() if name != "name"}

    def with_compute(self, flops_per_s: float) -> Rates:
        """Return the machine at another compute rate."""
        return replace(self, compute_flops_per_s=flops_per_s)


def load_machines(path: Path) -> dict[str, Rates]:
    """Read machine files as they are: keys that begin with an underscore are notes."""
    fields = {name for name in Rates.__dataclass_fields__ if name != "name"}
    return {
        name: Rates(name=name, **{key: rates[key] for key in fields})
        for name, rates in json.loads(path.read_text()).items()
        if not name.startswith("_")
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Work of a shape's operations on a machine."""

    shape: Shape
    rates: Rates
    seq_len: int = 1024

    def forward(self, tokens: float) -> float:
        """FLOPs of one block."""
        return tokens * 2 * (self.shape.block_params + self.seq_len * self.shape.hidden)

    def head(self, tokens: float) -> float:
        """FLOPs of the head's forward."""
        return tokens * 2 * self.shape.part_params

    def device_pass(self, nbytes: float) -> float:
        """FLOPs that could be done while `nbytes` of device memory are read and written."""
        return nbytes / self.rates.hbm_bytes_per_s * self.rates.compute_flops_per_s

    def model_flops(self, tokens: float) -> float:
        """FLOPs of a step without recomputation."""
        return 3 * (self.shape.num_blocks * self.forward(tokens) + self.head(tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The tasks of one step in launch order, and what is known of them without running them."""

    name: str
    tasks: list[Task]
    costs: Costs
    tokens: int
    marked: int = -1
    """Task at which one step is told from the next. -1: nothing of a step overlaps with the next one."""
    is_deferred: bool = True
    """Every update waits for the last gradient."""
    details: dict[str, object]

    def seconds(self, lane: Lane, *kinds: str) -> float:
        """Time that tasks of these kinds take in a lane, one after the other; no kinds: all of them."""
        tasks = (task for task in self.tasks if task.lane is lane and (not kinds or task.kind in kinds))
        return sum(task.work for task in tasks) / self.costs.rates.rate(lane)

    def limits(self) -> dict[str, float]:
        """Seconds below which no order of these tasks can be, by cause."""
        up = self.seconds(Lane.FETCH) + self.seconds(Lane.RESTORE)
        down = self.seconds(Lane.OFFLOAD) + self.seconds(Lane.SAVE)
        optimizer = self.seconds(Lane.HOST)
        backward = self.seconds(Lane.COMPUTE, "backward", "head") if self.is_deferred else 0.0
        return {
            "copies": max(up, down),
            "forward + backward": self.seconds(Lane.COMPUTE),
            "backward + optimizer" if self.is_deferred else "optimizer": backward + optimizer,
        }


LLAMA_28 = Shape(name="llama-8b-like-28", num_blocks=28)
