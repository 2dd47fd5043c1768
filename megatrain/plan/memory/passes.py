"""The number of micro-batches that can pass together without gradients in the memory that a step takes."""

from __future__ import annotations

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.policies import RECOMPUTE
from megatrain.model.profile.anatomy import IDS_BYTES, Anatomy
from megatrain.plan.memory.device_peaks import DevicePeaks


def most_without_gradients(
    anatomy: Anatomy,
    choice: Choice,
    batch: StepBatch,
    optimizer: Optimizer = DEFAULT,
    *,
    overlaps: bool = True,
    has_scratch: bool = True,
) -> int:
    """Return how many micro-batches fit into what the largest moment of a step takes.

    They leave nothing behind: each has the input of the layer that it comes to next, or the last layer's
    output and input while it waits for its turn at the head, and what the model's own forward holds. As
    many as a round has always fit.

    Args:
        anatomy: The anatomy of the model, for micro-batches as `batch` has them.
        choice: The choice, in which nothing is open.
        batch: The batch of a step.
        optimizer: The optimizer of the run.
        overlaps: Whether the lanes run at the same time, as in `DevicePeaks`.
        has_scratch: Whether updates on the device take scratch memory, as in `DevicePeaks`.
    """
    layers = anatomy.as_split(choice).layers
    peaks = DevicePeaks(anatomy, choice, batch, optimizer, overlaps=overlaps, has_scratch=has_scratch)
    boundary = max(layer.boundary_bytes for layer in anatomy.layers)
    each = max(layer.waiting_forward_bytes for layer in layers)
    each += anatomy.pass_bytes + boundary * (2 + anatomy.holds_embedding) + IDS_BYTES * anatomy.tokens
    inside = [
        layer.forward_peak_bytes[RECOMPUTE.name] + layer.saved_bytes[RECOMPUTE.name] - layer.boundary_bytes
        for layer in layers
    ]
    working = max(*inside, anatomy.norm_forward_peak_bytes, anatomy.head_forward_peak_bytes)
    room = peaks.largest.nbytes - peaks.constant - working
    return max(min(choice.lockstep, batch.num_micro_batches), room // max(1, each))
