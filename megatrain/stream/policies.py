"""What `attach` has decided: how an engine streams its model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatrain.config.choice import Activations
from megatrain.layout.moments import MomentFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """How an engine streams: what `attach` has decided, one value per question."""

    num_slots: int
    num_gradient_buffers: int
    activations: tuple[Activations, ...]
    """One per decoder layer."""
    boundaries_on_host: bool = False
    """The inputs of recomputed layers leave the device."""
    activations_on_drives: bool = False
    """All that leaves the device until its backward waits on drives."""
    residents: frozenset[int] = frozenset()
    """Blocks of which everything is on the device."""
    lockstep: int = 1
    """Micro-batches that pass a layer together."""
    micro_batch_size: int | None = None
    """Rows of a micro-batch into which a larger batch of `model(**batch)` is split; None: never."""
    head_chunk_tokens: int | None = None
    compiles: bool = False
    """Layers run through `torch.compile`."""
    host_limit: int | None = None
    fragments: bool = False
    """Layers are cut into fragments, where they come apart."""
    gradients_on_device: bool = False
    """Where complete gradients of streamed blocks wait for the norm."""
    updates: str = "deferred"
    """When the optimizer updates: `deferred`, `immediate` or `serial`."""
    moments: MomentFormat = MomentFormat.FP32
    """For which format of the optimizer's state memory was planned."""

    @property
    def boundaries(self) -> str:
        """Where the inputs of recomputed layers wait: `device`, `host` or `nvme`."""
        if self.boundaries_on_host:
            return "nvme" if self.activations_on_drives else "host"
        return "device"

    def describe(self) -> str:
        """Return one line for the log."""
        counts = Counter(policy.value for policy in self.activations)
        activations = ", ".join(
            policy if len(counts) == 1 else f"{policy} in {number}" for policy, number in counts.items()
        )
        return (
            f"layers: {len(self.activations)} through {self.num_slots} slots, {len(self.residents)} blocks "
            f"resident; activations: {activations}; boundaries on the "
            f"{self.boundaries}; micro-batches in lockstep: {self.lockstep}; "
            f"gradients wait on the {'device' if self.gradients_on_device else 'host'}; "
            f"compiled: {'yes' if self.compiles else 'no'}; optimizer state: {self.moments.describe()}"
        )
