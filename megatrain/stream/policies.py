"""What `attach` has decided: how an engine streams its model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatrain.layout.blocks import BlockLayout
from megatrain.layout.moments import MomentFormat, moment_bytes
from megatrain.plan.program.operations import BlockSize
from megatrain.stream.forward.layer_visit import Activations


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


def block_size(
    layout: BlockLayout, *, is_streamed: bool, on_device: bool, moments: MomentFormat = MomentFormat.FP32
) -> BlockSize:
    """Say what the schedule must know of a block."""
    num_split, num_full = layout.num_split, layout.num_state - layout.num_split
    return BlockSize(
        is_streamed=is_streamed,
        is_trained=layout.num_state > 0,
        fetch_bytes=layout.working_bytes,
        offload_bytes=layout.gradient_bytes,
        accumulator_bytes=4 * layout.num_state,
        # with fp32 moments: read 14 and write 12 bytes of a split master with bf16 gradient, 16 and 12 of an
        # fp32 one
        update_bytes=10 * num_split + 12 * num_full + 2 * moment_bytes(layout, moments),
        updates_on_device=on_device,
    )
