"""Counts a model's anatomy from its configuration or its modules: no weight is made and no memory is taken.

The model is built or copied without weights and its own modules run on fake tensors: the whole model once
with its layers left out, and one layer of every kind under every policy. What an operation does is counted
(FLOPs of matrix products and attention, bytes that all others read and write) and what it makes is followed
until nobody holds it.

What is taken for granted: rows are full, of one document each or packed; the model trains (dropout draws);
scaled dot product attention makes no T x T matrix, unless the model gives it a mask, as for packed rows, or,
for the CPU, asks for what its kernel cannot do; experts run as grouped products, whose cost does not depend
on how tokens are routed; layers that differ in nothing but their index cost the same. What a kernel takes for
itself is not seen, and the auxiliary loss of routers is left out, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.errors import MegatrainError, ModelError, first_line
from megatrain.layout.blocks import BlockLayout
from megatrain.model.expert_numbers import experts_of
from megatrain.model.experts.routes import COUNT_BYTES, routers_of
from megatrain.model.head.head import chunk_tokens_of
from megatrain.model.profile.anatomy import IDS_BYTES, POSITION_BYTES, Anatomy
from megatrain.model.profile.cost import Cost
from megatrain.model.profile.counter import Counter
from megatrain.model.profile.flops import (
    ALL_EXPERTS,
    active_parameters,
    count_flops,
    counts_all_experts,
)
from megatrain.model.profile.fragments import fragment, kind_of_outer
from megatrain.model.profile.rows import of_size
from megatrain.model.profile.whole_pass import CHUNKS, NOT_COUNTED, WholePass
from megatrain.model.weights.skeleton import num_parameters, skeleton_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from typing_extensions import Unpack

    from megatrain.model.profile.counter import ModelShape


def count_anatomy(
    config: PretrainedConfig,
    *,
    micro_batch_size: int,
    head_chunk_tokens: int | None = None,
    device_type: str = "accelerator",
    **model: Unpack[ModelShape],
) -> Anatomy:
    """Count what a model costs for one shape of micro-batch.

    Args:
        config: The configuration of a causal language model.
        micro_batch_size: The number of rows.
        head_chunk_tokens: The number of tokens in a chunk of the head, as in `attach`.
        device_type: `cpu` or `accelerator`.
        model: The rows, precision and adapters of the model, as in `Counter.of`.

    Raises:
        ModelError: The model cannot be built or streamed, decides by values what it computes, or does not
            compute the same where rows are shared out.
        ConfigError: A shape or a precision that there is not, or heads that cannot be shared out.
    """
    counter = Counter.of(config, micro_batch_size=micro_batch_size, **model)
    return _count(counter, head_chunk_tokens, device_type)


def count_sizes(
    config: PretrainedConfig,
    *,
    sizes: Sequence[int],
    head_chunk_tokens: int | None = None,
    device_type: str = "accelerator",
    **model: Unpack[ModelShape],
) -> list[Anatomy]:
    """Count what a model costs in micro-batches of several sizes, each as `count_anatomy` does, in one run.

    Args:
        config: The model's configuration; this and all that follows is as in `count_anatomy`.
        sizes: The numbers of rows of a micro-batch, a group of `alike`.
        head_chunk_tokens: The number of tokens in a chunk of the head.
        device_type: `cpu` or `accelerator`.
        model: The rows, precision and adapters of the model.

    Raises:
        ModelError, ConfigError: The model cannot be counted, for a reason of `count_anatomy`.
    """
    counter = Counter.of(config, micro_batch_size=1, **model)
    chunk = counter.let_run(sizes, head_chunk_tokens)
    whole = counter.run(chunk, device_type=device_type)
    return [
        _anatomy(counter, of_size(whole, number, but=NOT_COUNTED), size) for number, size in enumerate(sizes)
    ]


def alike(
    config: PretrainedConfig, sizes: Iterable[int], *, seq_len: int, head_chunk_tokens: int | None = None
) -> list[list[int]]:
    """Return sizes of micro-batches in groups that run the same operations, so that one shows what all take.

    A single row is by itself, since torch leaves operations out there, and so are sizes with which head and
    loss pass in two or three chunks.

    Args:
        config: The model's configuration.
        sizes: Rows of a micro-batch.
        seq_len: Tokens of a row, or of the part of it that one of several ranks has.
        head_chunk_tokens: The number of tokens in a chunk of the head, as in `attach`.
    """
    chunk = head_chunk_tokens or chunk_tokens_of(config)
    groups: dict[int, list[int]] = {}
    for size in sizes:
        num_chunks = min(-(-size * seq_len // chunk), CHUNKS + 1)
        is_alone = size == 1 or 1 < num_chunks <= CHUNKS
        groups.setdefault(-size if is_alone else num_chunks, []).append(size)
    return list(groups.values())


def count_model(
    model: PreTrainedModel,
    *,
    micro_batch_size: int,
    seq_len: int,
    precision: Literal["fp32", "bf16"],
    head_chunk_tokens: int | None = None,
    device_type: str = "accelerator",
    sequence: int = 1,
    compiles: bool = False,
    tile: int = 0,
) -> Anatomy:
    """Count what a model costs that exists, with its adapters and frozen parameters.

    The model is neither run nor changed, and its weights are not read. See `count_anatomy` for the arguments.

    Raises:
        ModelError: The model cannot be streamed, or what it computes cannot be followed without its weights.
        ConfigError: A shape or a precision that there is not.
    """
    try:
        skeleton = skeleton_of(model)
        counter = Counter(skeleton, micro_batch_size=micro_batch_size, seq_len=seq_len, precision=precision)
        counter.sequence, counter.compiles, counter.loss = sequence, compiles, "given"
        counter.tile(tile)
        return _count(counter, head_chunk_tokens, device_type)
    except MegatrainError:
        raise
    except Exception as error:  # a model's own code fails in its own way without weights
        raise ModelError(f"{type(model).__name__} cannot be counted: {first_line(error)}") from error


def _count(counter: Counter, head_chunk_tokens: int | None, device_type: str) -> Anatomy:
    """Count the model of a counter."""
    return _anatomy(counter, counter.run(head_chunk_tokens, device_type=device_type), counter.shape[0])


def _anatomy(counter: Counter, whole: WholePass, micro_batch_size: int) -> Anatomy:
    """Put together what was counted of a pass of so many rows."""
    model, seq_len = counter.model, counter.shape[1]
    own_len, shares = -(-seq_len // counter.sequence), counter.sequence > 1
    flops = count_flops(model, counter.layers)
    num_active = active_parameters(model)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    per_token = IDS_BYTES + POSITION_BYTES * (counter.is_packed or shares) + IDS_BYTES // 2 * shares
    experts = experts_of(model.config)
    routers = sum(len(routers_of(layer)) for layer in counter.layers)
    counts = 0 if experts is None else COUNT_BYTES * experts[0] * routers
    ids = per_token * micro_batch_size * own_len  # with the labels that were shifted before they were cut
    return Anatomy(
        model_type=counter.model_type,
        precision=counter.precision,
        micro_batch_size=micro_batch_size,
        seq_len=own_len,
        layers=counter.describe(whole),
        outer=tuple(
            fragment(block, layout, kind_of_outer(model, block), Cost())
            for block, layout in zip(counter.blocks, counter.layouts, strict=True)
            if block.module is None
        ),
        num_params=num_parameters(model),
        num_active_params=num_active,
        num_trained=num_trained,
        model_flops_per_token=flops.model_flops(seq_len),
        head_forward=whole.head_forward,
        head_backward=whole.head_backward,
        head_has_kernel=whole.head_has_kernel,
        head_saved_bytes=whole.head_saved_bytes,
        constant_bytes=buffers + whole.forward_bytes + ids + counts,
        checkpoint_bytes=_checkpoint_bytes(counter.layouts, leaves_base=hasattr(model, "peft_config")),
        pass_bytes=whole.forward_bytes + ids,
        graph_bytes=whole.graph_bytes + ids,
        holds_embedding=whole.holds_embedding,
        lets_go_of_embeddings=counter.lets_go_of_embeddings,
        norm_forward_peak_bytes=whole.norm_forward_peak_bytes,
        head_forward_peak_bytes=whole.head_forward_peak_bytes,
        head_backward_peak_bytes=whole.head_backward_peak_bytes,
        head_gradient_bytes=whole.head_gradient_bytes,
        embedding_peak_bytes=whole.embedding_peak_bytes,
        loss_reaches_layers=counter.has_router_loss,
        head_dim=whole.head_dim,
        num_heads=whole.num_heads,
        experts_whole=counter.experts_whole,
        warnings=counter.warnings + ((ALL_EXPERTS,) if counts_all_experts(model) else ()),
    )


def _checkpoint_bytes(layouts: Sequence[BlockLayout], *, leaves_base: bool) -> int:
    """Count the tensors of a checkpoint: working weights, remainders, and two moments; nothing is padded.

    With adapters (`leaves_base`), what is not trained is named there, and not saved.
    """
    total = 0
    for layout in layouts:
        for entry in layout.trained if leaves_base else layout.entries:
            total += entry.nbytes
            if entry.state_offset is not None:
                total += entry.numel * (8 + 2 * (entry.dtype == torch.bfloat16))
    return total
