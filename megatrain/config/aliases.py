"""Aliases: the names that users of transformers' Trainer and of TRL know, with their names here.

They are read at the top level of a file and as overrides, with the meaning that they have there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatrain.errors import ConfigError
from megatrain.objective.registry import DEFAULT, aliases

ALIASES: Mapping[str, str] = {
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attn_implementation",
    "rope_scaling": "model.rope_scaling",
    "use_liger_kernel": "model.kernels",
    "dataset_name": "data.path",
    "train_file": "data.path",
    "dataset_dir": "data.path",
    "dataset": "data.dataset",
    "dataset_config": "data.subset",
    "dataset_train_split": "data.split",
    "dataset_streaming": "data.streaming",
    "max_samples": "data.max_samples",
    "val_size": "data.val_size",
    "dataset_text_field": "data.text_column",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.grad_accumulation",
    "seed": "train.seed",
    "data_seed": "data.seed",
    "bf16": "train.precision",
    "full_determinism": "train.deterministic",
    "torch_compile": "train.compile",
    "learning_rate": "optim.lr",
    "adam_epsilon": "optim.eps",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "lr_scheduler_type": "optim.schedule",
    "lr_scheduler_kwargs": "optim.schedule_args",
    "warmup_steps": "optim.warmup_steps",
    "num_warmup_steps": "optim.warmup_steps",
    "warmup_ratio": "optim.warmup_steps",
    "stage": "train.loss",
    **{name: f"preference.{key}" for name, key in aliases().items()},
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
    "lora_modules_to_save": "lora.modules_to_save",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "checkpoint.resume",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "eval_on_start": "eval.at_start",
    "load_best_model_at_end": "eval.load_best",
    "metric_for_best_model": "eval.metric",
    "early_stopping_patience": "eval.patience",
    "early_stopping_threshold": "eval.min_delta",
    "logging_steps": "log.every",
    "report_to": "log.to",
    "output_dir": "out",
}

LEFT_OUT = object()
"""The meaning of a value that says no more than the default."""


def _switch(on: Any, off: Any) -> Callable[[Any], Any]:
    """Return the reader of a switch of theirs, which passes other values on to be refused."""
    return lambda value: on if value is True else off if value is False else value


def _strategy(value: Any) -> Any:
    return None if value == "no" else LEFT_OUT if value == "steps" else value


def _reporters(value: Any) -> Any:
    return [] if value in ("none", None) else [value] if isinstance(value, str) else value


def _metric(value: Any) -> Any:
    """Return the name of a set: `eval_loss` is that of the only one, `eval_code_loss` that of `code`."""
    name = str(value).removeprefix("eval_").removesuffix("loss").removesuffix("_")
    return name or None


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "max_grad_norm": lambda value: None if value in (0, 0.0) and not isinstance(value, bool) else value,
    "max_steps": lambda value: LEFT_OUT if value == -1 else value,
    "bf16": _switch("bf16", "fp32"),
    "use_liger_kernel": _switch("liger", "torch"),
    "torch_compile": _switch("on", "off"),
    "resume_from_checkpoint": lambda value: (
        "auto" if value is True else LEFT_OUT if value in (False, None) else value
    ),
    "eval_strategy": _strategy,
    "metric_for_best_model": _metric,
    "stage": lambda value: DEFAULT.name if value == "pt" else value,
    "loss_type": lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value,
    "report_to": _reporters,
}
"""The readers of values that mean something else here."""

NEEDLESS: Mapping[str, str] = {
    "gradient_checkpointing": "what is recomputed is planned (memory.activations)",
    "activation_checkpointing": "what is recomputed is planned (memory.activations)",
    "per_device_eval_batch_size": "evaluation takes train.micro_batch_size",
    "do_train": "train trains",
    "do_eval": "held-out data (data.val_size, data.eval_path) are evaluated",
    "logging_strategy": "log.every says how often",
    "logging_first_step": "the first step is always shown",
    "remove_unused_columns": "only the columns that are trained on are read",
    "dataloader_num_workers": "data are tokenised before the first step",
    "dataloader_pin_memory": "batches are small beside the weights that are copied",
    "ddp_find_unused_parameters": "ranks exchange gradients of whole layers, without DDP",
    "precompute_ref_log_probs": "the reference is always computed before the first step",
    "precompute_ref_batch_size": "the reference takes train.micro_batch_size",
    "optim": "the optimizer is AdamW, if optim.name does not say another",
}
"""The names whose values change nothing here, each with the reason."""

_REFUSED: Mapping[str, str] = {
    "fp16": "fp16 is not trained here; use train.precision=bf16, or fp32",
    "tf32": "tf32 is not used here, since fp32 is exact; use train.precision=bf16 for speed",
    "adam_beta1": "write both decays as optim.betas=[0.9, 0.999]",
    "adam_beta2": "write both decays as optim.betas=[0.9, 0.999]",
    "deepspeed": "megatrain streams the model's state itself; leave it out, and see megatrain plan",
    "fsdp": "megatrain streams the model's state itself; leave it out, and see megatrain plan",
    "load_in_4bit": "nothing is quantised here: leave it out (megatrain plan says what a base takes), or "
    "give a checkpoint in MXFP4 or FP8 with lora.base=as_stored",
    "load_in_8bit": "the weights are streamed at full precision, so nothing is quantised; leave it out",
    "greater_is_better": "the best evaluation is the one with the lowest loss; leave it out",
    "label_smoothing_factor": "megatrain train has no label smoothing; leave it out, or use the trainers of "
    "megatrain.hf",
    "ref_model": "the reference is the model before the first step (model.path); leave it out",
    "neftune_noise_alpha": "megatrain train adds no noise to embeddings; leave it out",
    "overwrite_output_dir": "a run is never overwritten; give a new directory with out=DIR",
    "push_to_hub": "a run is pushed when it is done: megatrain export RUN OUT --push REPO",
    "save_strategy": "use checkpoint.every=STEPS or epoch, or null for the end of the run only",
}
"""The names that have no meaning here unless they are switched off, each with the way out."""

ADAMW = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"}


def is_foreign(name: str, value: Any) -> bool:
    """Return whether a top-level name is one of theirs; `optim` is a section here, and a name there."""
    return (
        name in ALIASES
        or name in _REFUSED
        or (name in NEEDLESS and value is not None and not isinstance(value, Mapping))
    )


def translate(name: str, value: Any) -> tuple[str, Any]:
    """Return the key and the value that a name of theirs, or a key, means.

    Raises:
        ConfigError: The name or its value means nothing that can be done here.
    """
    if name in _REFUSED:
        is_off = value in (None, False, 0) or (name, value) == ("save_strategy", "steps")
        if not is_off:
            raise ConfigError(f"{name}={value}: {_REFUSED[name]}")
        return name, LEFT_OUT
    if name in NEEDLESS and is_foreign(name, value):
        if name == "optim" and str(value) not in ADAMW:
            raise ConfigError(
                f"optim={value}: megatrain trains with AdamW, or as optim.name says; leave it out, or use "
                "adamw_torch"
            )
        return name, LEFT_OUT
    read = _VALUES.get(name)
    return ALIASES.get(name, name), value if read is None else read(value)


def hint(name: str, value: Any) -> str:
    """Return the hint about the meaning of a name of theirs."""
    if name in NEEDLESS:
        return f"{name} changes nothing: {NEEDLESS[name]}"
    if name in _REFUSED:
        return f"{name} is off here anyway"
    key, read = translate(name, value)
    return f"{name} says nothing new" if read is LEFT_OUT else f"{name} is {key}"


_MARKS = {
    "LLaMA-Factory": (
        "model_name_or_path",
        {"stage", "finetuning_type", "dataset", "cutoff_len", "dataset_dir", "template"},
    ),
    "axolotl": ("base_model", {"datasets", "pretraining_dataset", "sequence_len"}),
}
"""The marks of each trainer's files: a key that they all have, and others of which one is there."""


def trainer_of(settings: Mapping[str, Any]) -> str | None:
    """Return the trainer whose training file has these settings; None if it is unknown."""
    for trainer, (key, others) in _MARKS.items():
        if key in settings and not others.isdisjoint(settings):
            return trainer
    return None
