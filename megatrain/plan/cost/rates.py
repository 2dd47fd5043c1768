"""The seconds of a step's operations on a machine, from bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.config.optimizers.optimizer import SCALE_NUMEL, Optimizer
from megatrain.config.optimizers.registry import DEFAULT, OTHERS
from megatrain.hardware import Drives, HardwareSpec
from megatrain.layout.block_bytes import BlockBytes
from megatrain.model.profile.cost import Cost

UPDATE_BYTES = 26
"""Host memory that AdamW reads (14) and writes (12) per parameter of a split master with fp32 moments: what
rates count in."""

_SCALED = BlockBytes(num_split=SCALE_NUMEL, num_state=SCALE_NUMEL, num_scales=1)


def bytes_per_update(optimizer: Optimizer) -> float:
    """Return the host memory that an update of a split master reads and writes per parameter."""
    return _SCALED.update_bytes(optimizer) / SCALE_NUMEL


def other_rates(nbytes_per_s: float) -> dict[str, float]:
    """Return parameters per second of all but the default, where any reads and writes so many bytes."""
    return {each.rate_key: nbytes_per_s / bytes_per_update(each) for each in OTHERS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernels that run: ours as they are set, or another system's whose rate is to be predicted."""

    fuses_layers: bool = False
    """Norms, rotations, activation functions and sums of a layer are joined: by torch.compile or Liger."""
    fuses_head: bool = False
    """Operations of head and loss are joined too."""
    device_update_bytes: int | None = None
    """Device memory that an update there touches per parameter; None: ours does."""
    host_update_bytes: float | None = None
    """Host memory that an update touches per parameter, by the host's kernels or by copies; None: as our
    optimizer's does."""
    sum_bytes: int = 4
    """Bytes per bf16 parameter of a gradient that adds up over rounds: ours are in fp32."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine with the dtype that it computes in, the optimizer of the run, and the kernels."""

    spec: HardwareSpec
    precision: str
    optimizer: Optimizer = DEFAULT
    kernels: Kernels = Kernels()
    head_dim: int = 128
    """The width of the model's attention heads."""

    @property
    def matmul_flops_per_s(self) -> float:
        """Return the FLOP/s of large matrix products."""
        return self.spec.matmul_flops_per_s[self.precision]

    def forward_s(self, cost: Cost) -> float:
        """Return the seconds of a layer's forward on the device; operations run one after the other."""
        return self._pass_s(cost, self.attention_s(cost), is_fused=self.kernels.fuses_layers)

    def backward_s(self, cost: Cost) -> float:
        """Return the seconds of a layer's backward."""
        return self._pass_s(cost, self.attention_backward_s(cost), is_fused=self.kernels.fuses_layers)

    def head_s(self, cost: Cost) -> float:
        """Return the seconds of a pass of head and loss, which has no attention."""
        return self._pass_s(cost, self.attention_s(cost), is_fused=self.kernels.fuses_head)

    def attention_s(self, cost: Cost) -> float:
        """Return the seconds of the attention in a layer's forward."""
        return self._attention_s(cost, self.spec.attention_flops_per_s)

    def attention_backward_s(self, cost: Cost) -> float:
        """Return the seconds of the attention in a layer's backward."""
        rates = self.spec.attention_backward_flops_per_s or self.spec.attention_flops_per_s
        return self._attention_s(cost, rates)

    def _pass_s(self, cost: Cost, attention_s: float, *, is_fused: bool) -> float:
        """Return the time of the kernels, or of launching them if that is longer."""
        computed_s = (
            cost.matmul_flops / self.matmul_flops_per_s
            + attention_s
            + self.device_pass_s(cost.fused_bytes if is_fused else cost.moved_bytes)
        )
        launches = self.spec.launches_per_s
        if launches is not None:
            computed_s = max(computed_s, (cost.num_kernels if is_fused else cost.num_operations) / launches)
        return computed_s + (self.swap_s(cost.swapped_bytes) if cost.swapped_bytes else 0.0)

    def _attention_s(self, cost: Cost, rates: Mapping[str, float]) -> float:
        if not cost.attention_flops:
            return 0.0
        rate = rates.get(f"{self.precision}:{self.head_dim}", rates[self.precision])
        return cost.attention_flops / rate + self.device_pass_s(cost.attention_bytes)

    def device_pass_s(self, nbytes: float) -> float:
        """Return the seconds in which the device reads or writes so many bytes of its own memory."""
        return nbytes / self.spec.device_bytes_per_s

    def swap_s(self, nbytes: float) -> float:
        """Return the seconds in which ranks that share out rows give each other so many bytes."""
        if self.spec.peer_bytes_per_s is not None:
            return nbytes / self.spec.peer_bytes_per_s
        if self.spec.is_cpu:  # written, and read by the one who gets it
            return self.device_pass_s(2 * nbytes)
        return self.offload_s(nbytes) + self.fetch_s(nbytes)

    def fetch_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to the device, alone on the link."""
        return nbytes / self.spec.h2d_bytes_per_s

    def offload_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to the host, alone on the link."""
        return nbytes / self.spec.d2h_bytes_per_s

    @property
    def update_bytes_per_s(self) -> float:
        """Return the bytes per second of host memory that updates read and write, alone."""
        optimizer, nbytes = self.optimizer, bytes_per_update(self.optimizer)
        usual = optimizer.usual_rate or UPDATE_BYTES / nbytes
        known = self.spec.compressed_params_per_s
        return known.get(optimizer.rate_key, self.spec.update_rate * usual) * nbytes

    def update_s(self, nbytes: float) -> float:
        """Return the seconds of updates that read and write so many bytes of host memory, alone."""
        return nbytes / self.update_bytes_per_s

    @property
    def update_traffic(self) -> float:
        """Return the bytes of host memory that updates touch, over those that our optimizer's would."""
        touched = self.kernels.host_update_bytes
        return 1.0 if touched is None else touched / bytes_per_update(self.optimizer)

    def host_pass_s(self, nbytes: float) -> float:
        """Return the seconds in which the host reads or writes so many bytes of its own memory."""
        return nbytes / (UPDATE_BYTES * self.spec.update_rate)

    @property
    def updates_in_compute(self) -> bool:
        """Return whether updates of resident blocks run among compute; else the host's kernels do them."""
        return self.spec.has_accelerator

    def device_update_s(self, sizes: BlockBytes) -> float:
        """Return the seconds of an update on the device of blocks of these sizes; on a CPU, the host's."""
        if self.spec.is_cpu:
            return self.update_s(sizes.update_bytes(self.optimizer))
        products_s = self.optimizer.flops * sizes.num_state / self.matmul_flops_per_s
        return max(self.device_pass_s(self._device_update_bytes(sizes)), products_s)

    def _device_update_bytes(self, sizes: BlockBytes) -> int:
        if not self.updates_in_compute:  # the host's kernels, which on emulated lanes take as long as this
            return sizes.update_bytes(self.optimizer)
        per_param = self.kernels.device_update_bytes
        if per_param is None and self.spec.fuses_updates and self.optimizer.may_fuse:
            return sizes.fused_update_bytes(self.optimizer)
        return (per_param or self.optimizer.device_bytes) * sizes.num_state

    @property
    def drives(self) -> Drives:
        """Return the machine's drives; it has some."""
        assert self.spec.drives is not None
        return self.spec.drives

    def read_s(self, nbytes: float) -> float:
        """Return the seconds of a read from the drives."""
        return nbytes / self.drives.read_bytes_per_s

    def write_s(self, nbytes: float) -> float:
        """Return the seconds of a write to the drives."""
        return nbytes / self.drives.write_bytes_per_s
