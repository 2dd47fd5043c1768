"""A machine as numbers: what a plan is made for. Rates are what a trainer achieves, not datasheet peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

UNKNOWN_NETWORK_BYTES_PER_S = 1.25e9
"""10 Gbit/s, for a network of which nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNode:
    """Host memory behind one controller: a NUMA node, or memory over CXL."""

    nbytes: int
    bytes_per_s: float
    """The rate of reads and writes together, by all its cores."""
    kind: str = "dram"
    """`dram` or `cxl`. State goes to `dram` first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drives:
    """NVMe drives that state is striped over, taken together."""

    nbytes: int
    """Free bytes."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    """The sustained rate, after the drives' caches are full."""
    num_drives: int = 1
    is_direct: bool = True
    """Whether I/O is direct; otherwise it goes through the page cache, which costs the CPU more."""
    is_duplex: bool = False
    """Reads and writes at the same time do not slow each other down."""
    rated_bytes_written: float | None = None
    """Endurance of all drives together; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    """A machine. Bytes are bytes, never GiB; money is US dollars."""

    name: str
    device: str
    """Name of the accelerator; `cpu` where the host computes, so that device bytes are host bytes."""
    device_bytes: int | None
    """Memory of the device that a process may use; None: no limit of its own."""
    matmul_flops_per_s: Mapping[str, float]
    """The achieved rate of large matrix products, by dtype: `bf16`, `fp32`."""
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """The datasheet's rates, by dtype, of which MFU is a part; empty: the rates of products stand for it."""
    attention_flops_per_s: Mapping[str, float]
    """The achieved rate of causal attention's forward, counted at half, by dtype for heads of 128; `bf16:64`
    and the like are for heads of another size."""
    device_bytes_per_s: float
    """The rate of device memory, reads and writes together, at which norms and activation functions run."""
    h2d_bytes_per_s: float
    """Host to device, page-locked, alone."""
    d2h_bytes_per_s: float
    attention_backward_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """The rate of its backward, counted as 2.5 forwards: the scores are made again. Empty: as the forward."""
    flash2_share: float = 1.0
    """Part of these rates in bf16 that FlashAttention-2 reaches, which is what a deterministic run takes; 1:
    they are its own."""
    multiprocessors: int | None = None
    """Multiprocessors of the device, by which its deterministic backward cuts its work; None: its cost is not
    known."""
    both_share: float = 1.0
    """Part of each of these rates that is left while the other goes on too."""
    pageable_share: float = 0.3
    """Part of these rates that memory which is not page-locked reaches: that of resident blocks' state."""
    memory: tuple[MemoryNode, ...]
    update_params_per_s: Mapping[int, float]
    """AdamW updates of split masters with moments in fp32, by number of threads."""
    compressed_params_per_s: Mapping[str, float] = field(default_factory=dict)
    """The rate with moments in `bf16` and `int8`, by the best number of threads; empty: it is not known."""
    num_cores: int
    num_gpus: int = 1
    """Devices of a node that train together. Host memory, cores, updates and drives are of all of them; every
    other rate is of one, each on a link of its own."""
    peer_bytes_per_s: float | None = None
    """The rate at which a device sends to the others of its node in a collective and receives as much; None:
    they have no access to each other, and what they exchange passes through host memory."""
    peer_latency_s: float = 0.0
    """The time of a collective among them beside its bytes."""
    num_nodes: int = 1
    """Machines like this one that train together."""
    network_bytes_per_s: float | None = None
    """The rate at which a node sends to others, and receives as much, for all of its devices; None: not
    known, and a run over several nodes is planned with `UNKNOWN_NETWORK_BYTES_PER_S`."""
    network_latency_s: float = 0.0
    """The time of a collective among nodes beside its bytes, for each further node."""
    drives: Drives | None = None
    device_watts: float | None = None
    """The power of the device under load."""
    host_watts: float | None = None
    """The power of everything else."""
    price_usd: float | None = None
    price_per_hour_usd: float | None = None
    launch_s: float = 0.0
    """Time that a visit of a block takes beside its arithmetic, where the host computes: hooks, Python."""
    launches_per_s: float | None = None
    """Operations that a thread launches on an accelerator, Python, autograd and hooks included. A layer takes
    no less time than its launches; None: that is not known."""
    fuses_updates: bool = True
    """AdamW of resident blocks is one kernel on the accelerator; False: torch's operations, with scratch."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The source of each field."""

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s that MFU is a part of."""
        return self.peak_flops_per_s.get(dtype, self.matmul_flops_per_s[dtype])

    @property
    def is_cpu(self) -> bool:
        """Whether the host computes."""
        return self.device == "cpu"

    @property
    def has_accelerator(self) -> bool:
        """Whether a real device computes beside the host: not the host itself, nor an emulated one."""
        return not (self.is_cpu or self.launches_inline)

    @property
    def launches_inline(self) -> bool:
        """Whether the thread that launches copies computes too, as on emulated accelerators."""
        return self.device == "emulated"

    @property
    def updates_with_scratch(self) -> bool:
        """Whether resident blocks update by torch's operations, which take scratch memory."""
        return self.is_cpu or (self.has_accelerator and not self.fuses_updates)

    @property
    def host_bytes(self) -> int:
        """All host memory that the run may use."""
        return sum(node.nbytes for node in self.memory)

    @property
    def host_bytes_per_s(self) -> float:
        """The rate of host memory, of all nodes together."""
        return sum(node.bytes_per_s for node in self.memory)

    @property
    def update_rate(self) -> float:
        """Parameters per second of AdamW with the best number of threads."""
        return max(self.update_params_per_s.values())

    @property
    def num_ranks(self) -> int:
        """Devices of all nodes: one rank each."""
        return self.num_gpus * self.num_nodes

    def with_ranks(self, num_gpus: int, num_nodes: int = 1) -> HardwareSpec:
        """Return so many nodes like this one, of each of which so many devices are used."""
        return replace(self, num_gpus=num_gpus, num_nodes=num_nodes)

    def of_rank(self) -> HardwareSpec:
        """Return the machine as a rank has it while all do the same: with its part of what they share."""
        count = self.num_gpus
        if count == 1:
            return self
        drives = self.drives
        if drives is not None:
            read, write = drives.read_bytes_per_s / count, drives.write_bytes_per_s / count
            drives = replace(drives, read_bytes_per_s=read, write_bytes_per_s=write)
        return replace(
            self,
            memory=tuple(replace(node, bytes_per_s=node.bytes_per_s / count) for node in self.memory),
            update_params_per_s={n: rate / count for n, rate in self.update_params_per_s.items()},
            compressed_params_per_s={n: rate / count for n, rate in self.compressed_params_per_s.items()},
            drives=drives,
        )

    def with_ram(self, nbytes: int) -> HardwareSpec:
        """Return the machine with another amount of host memory, at the same rates."""
        share = nbytes / max(1, self.host_bytes)
        nodes = tuple(replace(node, nbytes=int(node.nbytes * share)) for node in self.memory)
        short = nbytes - sum(node.nbytes for node in nodes)
        first = replace(nodes[0], nbytes=nodes[0].nbytes + short)
        return replace(self, memory=(first, *nodes[1:]))

    def with_drive_bytes(self, nbytes: int) -> HardwareSpec:
        """Return the machine with another amount of free space on its drives; 0: none.

        A machine without drives gets one of a common kind, 6 GB/s read and 3 GB/s written; how much it bears
        is not known.
        """
        if nbytes == 0:
            return replace(self, drives=None)
        drives = self.drives or Drives(nbytes=nbytes, read_bytes_per_s=6e9, write_bytes_per_s=3e9)
        return replace(self, drives=replace(drives, nbytes=nbytes))
