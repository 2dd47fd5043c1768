"""The arguments of a streaming trainer: its own, and the meaning of TrainingArguments for it.

Nothing of TrainingArguments is silently ignored: what streaming does in another way is mapped and logged;
what it cannot do is refused before anything is loaded, with the setting to write instead.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatrain.config.budgets import ALL, require_budget, require_compile
from megatrain.config.choice import Choice, StepBatch
from megatrain.config.rope import read_rope_scaling
from megatrain.config.runs import require_power_of_two
from megatrain.distributed.alone import ALONE, Alone
from megatrain.errors import ConfigError
from megatrain.hardware.accelerators import can_compile
from megatrain.hf.ranks import own_state
from megatrain.model.sequence.range import OF_TRAINER, RowRange, check_row
from megatrain.store.placement import Tiers
from megatrain.stream.forward.attention import prefers_cudnn
from megatrain.stream.lanes.devices import compute_device

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

    from megatrain.distributed.ranks import Ranks
    from megatrain.stream.lanes import Lanes

_log = logging.getLogger(__name__)

EVEN_TOKENS = 64
"""Rows are padded to a multiple of so many tokens where something is made for each length of them."""

_ADAMW = ("adamw_torch", "adamw_torch_fused")
"""The values of `optim` that mean the optimizer `engine.adamw`."""

_INSTEAD = {
    "adamw_bnb_8bit": "MegatrainArguments(optimizer_state='int8')",
    "adamw_8bit": "MegatrainArguments(optimizer_state='int8')",
    "paged_adamw_8bit": "MegatrainArguments(optimizer_state='int8')",
    "paged_adamw_32bit": "optim='adamw_torch': its state is in host memory as it is",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatrainArguments:
    """The settings by which a trainer's model streams; every default is planned for the model and machine."""

    choice: Choice = field(default_factory=Choice)
    """The decided part of the choice, such as `Choice(lockstep=4)`; the rest is planned."""
    device: str | torch.device | Lanes | None = None
    """The device that computes; None takes the device of TrainingArguments."""
    seq_len: int | None = None
    """The number of tokens of the longest row, for the plan; None takes `max_length` of TRL's arguments, or
    the model's context, at most 4,096."""
    rope_scaling: Mapping[str, Any] | None = None
    """The scaling of the rotary embeddings of a model that is given by its path, as in `megatrain.load`."""
    optimizer_state: str = "fp32"
    """The format of the moments: `fp32`, or `bf16` or `int8`, which are not exact."""
    compile: str = "auto"
    """Whether layers run through torch.compile: `on`, `off` or `auto`."""
    activation_budget: float = ALL
    """The share of what compiled layers would keep for their backward that they may keep, as in `attach`."""
    deterministic: bool = False
    """Whether every run on the same device gives the same bits."""
    host_limit: int | str | None = None
    """The host memory that the state may take, in bytes or as `64GiB`; None means all there is."""
    device_limit: int | str | None = None
    """The device memory for streaming, in bytes or as `64GiB`; None means all there is."""
    tiers: Tiers | None = None
    """The drives, and the state that lives there."""
    tile_tokens: int | None = None
    """The tokens of a tile of a long row, which decides the last bits (`train.tile_tokens`); None: as many as
    follow from `seq_len`."""
    shards: int | None = None
    """The number of runs of a step in which gradients add up: a power of two, which decides the bits
    (`parallel.shards`). None means as many as ranks."""

    def __post_init__(self) -> None:
        """Refuse what would be refused only after the model is loaded.

        Raises:
            ConfigError: `seq_len`, `rope_scaling`, `compile`, `activation_budget`, `tile_tokens` or `shards`
                is none that there is.
        """
        if self.seq_len is not None and self.seq_len < 2:
            raise ConfigError(f"MegatrainArguments(seq_len={self.seq_len}): a row has at least 2 tokens")
        if self.rope_scaling is not None:
            read_rope_scaling(self.rope_scaling)
        require_compile(self.compile)
        require_budget(self.activation_budget)
        if self.tile_tokens is not None and self.tile_tokens < 0:
            raise ConfigError(
                f"MegatrainArguments(tile_tokens={self.tile_tokens}): a tile has at least 1 token; 0 lets "
                "rows pass whole"
            )
        if self.shards is not None:
            require_power_of_two(self.shards, f"MegatrainArguments(shards={self.shards})")

    def attach_settings(
        self,
        args: TrainingArguments,
        rows: RowRange,
        precision: str,
        num_passes_before: int = 0,
        ranks: Ranks | Alone = ALONE,
    ) -> dict[str, Any]:
        """Return the keywords of `megatrain.attach`.

        Args:
            args: The arguments of the trainer, as `mapped` returns them.
            rows: The range of the model.
            precision: The precision, as `precision_of` returns it.
            num_passes_before: The number of passes before the loss, as in `StepBatch`.
            ranks: The ranks that train together.
        """
        return {
            "ranks": ranks,
            "device": self.device if self.device is not None else args.device,
            "precision": precision,
            "batch": self.batch(args, rows, num_passes_before, ranks.size),
            "compile": self.compile,
            "activation_budget": self.activation_budget,
            "optimizer_state": self.optimizer_state,
            "host_limit": self.host_limit,
            "device_limit": self.device_limit,
            "tiers": self.tiers,
            "deterministic": self.deterministic,
        }

    def batch(
        self, args: TrainingArguments, rows: RowRange, num_passes_before: int = 0, num_ranks: int = 1
    ) -> StepBatch:
        """Return the batch of a step of all ranks together.

        Raises:
            ConfigError: The ranks cannot share it out, or rows are longer than the model's context.
        """
        shards = num_ranks if self.shards is None else self.shards
        require_power_of_two(shards, f"MegatrainArguments(shards={shards})")
        if self.seq_len is not None:
            check_row(
                self.seq_len,
                rows,
                named="MegatrainArguments(seq_len={seq_len})",
                extends=OF_TRAINER,
                is_set=self.rope_scaling is not None,
            )
        most = getattr(args, "max_length", None) or 4096
        longest = self.seq_len or min(most, rows.longest or most)
        batch = StepBatch(
            micro_batch_size=args.per_device_train_batch_size,
            seq_len=longest,
            num_micro_batches=args.gradient_accumulation_steps,
            num_passes_before=num_passes_before,
            num_runs=shards,
            tile_tokens=self.tile_tokens,
        )
        batch.runs.shared_out(num_ranks)
        return batch


def mapped(args: TrainingArguments, ranks: Ranks | Alone = ALONE) -> TrainingArguments:
    """Return a copy of arguments for the plain trainer, after a check that all of them can be kept.

    Args:
        args: The user's arguments for each rank.
        ranks: The ranks, each of which goes through all micro-batches of a step.

    Raises:
        ConfigError: One of the arguments cannot be kept.
    """
    _refuse(args)
    args = copy.copy(args)
    if args.gradient_checkpointing:
        _log.info(
            "gradient_checkpointing=True: the plan says what stays of each layer (recompute, offload, keep); "
            "MegatrainArguments(choice=Choice(activations='recompute')) says it for all"
        )
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, False)
            setattr(args, f"{name}_kwargs", None)
    if ranks.size > 1:  # one process reads its batches as the plain trainer does
        _refuse_for_ranks(args, ranks)
        args.gradient_accumulation_steps *= ranks.size
        args.accelerator_config = copy.copy(args.accelerator_config)
        args.accelerator_config.dispatch_batches = False
        args.distributed_state = own_state()
    return args


def with_even_rows(given: dict[str, Any], megatrain: MegatrainArguments) -> None:
    """Have the rows of a trainer padded to multiples of `EVEN_TOKENS`, where that saves work.

    Each length of rows is compiled for itself, and where cuDNN attends it makes a plan for each. TRL's
    arguments that name a multiple keep it (1: no padding to any), and so does a collator; what labels leave
    out, and the mask, is padded as they always do.

    Args:
        given: The arguments of the plain trainer, whose `args` are a copy; a collator is replaced by one.
        megatrain: The trainer's own settings.
    """
    args = given["args"]
    asked: Any = args.device if megatrain.device is None else megatrain.device
    device = compute_device(asked) if isinstance(asked, str) else getattr(asked, "device", asked)
    compiles = megatrain.compile == "on" or (megatrain.compile == "auto" and can_compile(device))
    if not compiles and not prefers_cudnn(device):
        return
    if getattr(args, "pad_to_multiple_of", 0) is None:
        args.pad_to_multiple_of = EVEN_TOKENS
    if getattr(given.get("data_collator"), "pad_to_multiple_of", 0) is None:
        given["data_collator"] = copy.copy(given["data_collator"])
        given["data_collator"].pad_to_multiple_of = EVEN_TOKENS


def _refuse_for_ranks(args: TrainingArguments, ranks: Ranks | Alone) -> None:
    config: Any = args.accelerator_config
    for is_wrong, message in (
        (
            bool(config.dispatch_batches) or bool(config.split_batches),
            "accelerator_config has dispatch_batches or split_batches, but every rank reads all batches and "
            "trains its own; leave them out",
        ),
        (
            args.save_on_each_node and ranks.num_nodes > 1,
            "save_on_each_node=True: rank 0 writes the checkpoint of all nodes; leave it out",
        ),
    ):
        if is_wrong:
            raise ConfigError(message)


def _refuse(args: TrainingArguments) -> None:
    optim = str(getattr(args.optim, "value", args.optim))
    instead = _INSTEAD.get(optim, "optim='adamw_torch'")
    kwargs: Mapping[str, Any] = args.gradient_checkpointing_kwargs or {}
    unknown = sorted(set(kwargs) - {"use_reentrant"})
    problems = [
        (optim not in _ADAMW, f"optim is {optim}, but a streamed model is trained by AdamW; use {instead}"),
        (bool(args.optim_args), f"optim_args is {args.optim_args!r}, which AdamW of megatrain does not take"),
        (bool(args.optim_target_modules), "optim_target_modules is for optimizers other than AdamW"),
        (
            args.fp16,
            "fp16=True: loss scaling is not needed with bf16 weights and fp32 masters; use bf16=True",
        ),
        (
            args.fp16_full_eval or args.bf16_full_eval,
            "fp16_full_eval and bf16_full_eval cast a model whose weights the engine holds; leave them out",
        ),
        (
            bool(unknown),
            f"gradient_checkpointing_kwargs has {', '.join(unknown)}: what stays of each layer is "
            "MegatrainArguments(choice=Choice(activations=...)), such as 'recompute_cheap' or 'offload'",
        ),
        (
            bool(getattr(args, "activation_offloading", False)),
            "activation_offloading=True: use MegatrainArguments(choice=Choice(activations='offload'))",
        ),
        (args.torch_compile, "torch_compile=True: use MegatrainArguments(compile='on')"),
        (
            args.use_liger_kernel,
            "use_liger_kernel=True replaces forwards that the engine has overridden; leave it out",
        ),
        (args.auto_find_batch_size, "auto_find_batch_size=True: the plan fits the batch; leave it out"),
        (
            bool(args.deepspeed) or bool(args.fsdp),
            "deepspeed and fsdp divide a model over GPUs; megatrain streams it through each: leave them out",
        ),
        (
            args.n_gpu > 1,
            f"{args.n_gpu} GPUs are visible, over which Trainer would copy the model; start one process for "
            "each with torchrun, or make one visible (CUDA_VISIBLE_DEVICES=0)",
        ),
    ]
    for is_wrong, message in problems:
        if is_wrong:
            raise ConfigError(message)
