"""What operations of a step cost on a machine: seconds, from bytes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.hardware import Drives, HardwareSpec
from megatrain.layout.moments import MomentFormat
from megatrain.model.profile.anatomy import Cost

UPDATE_BYTES = 26
"""Host memory that AdamW reads (14) and writes (12) per parameter of a split master with fp32 moments: what
rates count in."""

DEVICE_UPDATE_BYTES = 650
"""Device memory that an update there reads and writes per parameter, in 55 passes (`optim.device`)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine with the dtype that it computes in, and how the optimizer keeps its moments."""

    spec: HardwareSpec
    precision: str
    moments: MomentFormat = MomentFormat.FP32

    @property
    def matmul_flops_per_s(self) -> float:
        """FLOP/s of large matrix products."""
        return self.spec.matmul_flops_per_s[self.precision]

    def compute_s(self, cost: Cost) -> float:
        """Return the seconds of a pass on the device; operations run one after the other."""
        return (
            cost.matmul_flops / self.matmul_flops_per_s
            + cost.attention_flops / self.spec.attention_flops_per_s[self.precision]
            + self.device_pass_s(cost.moved_bytes)
        )

    def device_pass_s(self, nbytes: float) -> float:
        """Return the seconds in which the device reads or writes so many bytes of its own memory."""
        return nbytes / self.spec.device_bytes_per_s

    def fetch_s(self, nbytes: float, *, beside: bool = False) -> float:
        """Return the seconds of a copy to the device; `beside`: while others go the other way."""
        return nbytes / (self.spec.h2d_bytes_per_s * (self.spec.both_share if beside else 1.0))

    def offload_s(self, nbytes: float, *, beside: bool = False) -> float:
        """Return the seconds of a copy to the host."""
        return nbytes / (self.spec.d2h_bytes_per_s * (self.spec.both_share if beside else 1.0))

    def update_s(self, nbytes: int) -> float:
        """Return the seconds of AdamW that reads and writes so many bytes of host memory."""
        return nbytes / (UPDATE_BYTES * self.spec.update_rate)

    def host_pass_s(self, nbytes: float) -> float:
        """Return the seconds in which the host reads or writes so many bytes of its own memory."""
        return nbytes / (UPDATE_BYTES * self.spec.update_rate)

    def device_update_s(self, num_state: int, nbytes: int) -> float:
        """Return the seconds of AdamW on the device; where a CPU computes, it is the host's.

        Args:
            num_state: State elements.
            nbytes: That the host's kernels would read and write of them.
        """
        if self.spec.is_cpu or self.spec.launches_inline:
            return self.update_s(nbytes)
        return self.device_pass_s(DEVICE_UPDATE_BYTES * num_state)

    @property
    def drives(self) -> Drives:
        """The machine's drives; it has some."""
        assert self.spec.drives is not None
        return self.spec.drives

    def read_s(self, nbytes: float) -> float:
        """Return the seconds of a read from the drives."""
        return nbytes / self.drives.read_bytes_per_s

    def write_s(self, nbytes: float) -> float:
        """Return the seconds of a write to the drives."""
        return nbytes / self.drives.write_bytes_per_s
