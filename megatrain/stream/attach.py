"""`megatrain.attach`: check that a model fits, move its state to the host, and put an engine under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatrain.errors import ConfigError, ModelError
from megatrain.store.state import read_precision
from megatrain.stream.bind import bind, require_device_memory
from megatrain.stream.devices import make_lanes
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import Lanes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attach(
    model: PreTrainedModel,
    *,
    device: str | torch.device | Lanes = "cpu",
    precision: str = "fp32",
    num_slots: int = 2,
    activations: str | Sequence[str] = "recompute",
    num_gradient_buffers: int = 1,
    head_chunk_tokens: int | None = None,
    accumulates: bool = False,
    host_limit: int | None = None,
    device_limit: int | None = None,
) -> Engine:
    """Make a model train by streaming, in place; `engine.detach()` undoes it.

    Args:
        model: A Hugging Face causal LM on the CPU, or one from `megatrain.load`.
        device: Where to compute: `cpu`, `cuda`, `cuda:N`, `auto`, or `emulated` and `checked` for tests.
        precision: `fp32`, or `bf16`: bf16 weights that are the upper half of exact fp32 masters.
        num_slots: Device buffers for streamed blocks; 2 overlap a copy with compute, 1 saves memory.
        activations: `recompute` or `keep`; one for all blocks, or a sequence with one per streamed block.
        num_gradient_buffers: Device buffers in which gradients of streamed blocks are gathered.
        head_chunk_tokens: Tokens that pass the head and the loss at a time; None: chosen so that small
            batches take one chunk, which is bitwise equal to the model's own loss.
        accumulates: Steps will have several micro-batches. bf16 sums them in fp32, which takes 4 bytes per
            parameter more; they are counted in the check before allocation, and taken when first needed.
        host_limit: Bytes of host memory that the state may take; None: what the machine and its cgroups give.
        device_limit: Bytes of device memory for slots, resident blocks and gradients; None: what there is.

    Raises:
        ModelError: The model cannot be streamed exactly.
        CapacityError: The state does not fit into host or device memory; nothing was allocated.
        ConfigError: An argument out of range.
    """
    if num_slots < 1:
        raise ConfigError(f"num_slots is {num_slots}; use 1 or more")
    if num_gradient_buffers < 1:
        raise ConfigError(f"num_gradient_buffers is {num_gradient_buffers}; use 1 or more")
    if head_chunk_tokens is not None and head_chunk_tokens < 1:
        raise ConfigError(f"head_chunk_tokens is {head_chunk_tokens}; use 1 or more, or None")
    kept = read_precision(precision)
    if getattr(model, "_megatrain_engine", None) is not None:
        raise ModelError("the model is attached to an engine already; call engine.detach() first")
    lanes = make_lanes(device, device_limit)
    require_device_memory(model, kept, lanes, num_slots, num_gradient_buffers)
    binding = bind(model, kept, accumulates=accumulates, host_limit=host_limit)
    return Engine(
        model,
        binding,
        lanes,
        num_slots=num_slots,
        activations=activations,
        num_gradient_buffers=num_gradient_buffers,
        head_chunk_tokens=head_chunk_tokens,
        host_limit=host_limit,
    )
