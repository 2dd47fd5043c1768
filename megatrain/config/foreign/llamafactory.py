"""Training files of LLaMA-Factory: flat keys, data sets by their names in `dataset_info.json`.

Source: the fields and defaults of its hparams, version 0.9, and transformers' TrainingArguments.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from megatrain.config.foreign.translation import NEEDLESS_MEMORY, QUANTISED, Translation, names_in
from megatrain.errors import ConfigError
from megatrain.objective.registry import OBJECTIVES

_REASONS = {
    "overwrite_cache": "prepared data is found again by what it was made of",
    "overwrite_output_dir": "a run that is there is gone on with; give another directory for a new one",
    "plot_loss": "report.html is written at the end of each run",
    "preprocessing_batch_size": "rows are read one by one",
    "tokenized_path": "prepared data is kept and found again by itself; data.cache says where",
    "dataloader_num_workers": "data.workers is for tokenising; batches need no process",
    "ddp_timeout": "parallel.timeout says how many seconds ranks wait for one another",
    "disable_gradient_checkpointing": NEEDLESS_MEMORY,
    "use_unsloth": NEEDLESS_MEMORY,
    "use_unsloth_gc": NEEDLESS_MEMORY,
    "per_device_eval_batch_size": "evaluation takes train.micro_batch_size",
    "eval_accumulation_steps": "losses are added up as they come",
    "include_num_input_tokens_seen": "metrics.jsonl counts the tokens with a label",
    "do_eval": "data.val_size and data.eval_path say what is evaluated on",
    "do_predict": "megatrain sample continues a prompt",
    "predict_with_generate": "evaluation is loss and perplexity; eval.prompts are continued",
    "run_name": "the run directory is the name",
    "push_to_hub": "megatrain export has the switch for it",
    "save_only_model": "a checkpoint always has the whole state; hf/ is the model alone",
    "quantization_bit": QUANTISED,
    "quantization_method": QUANTISED,
    "quantization_type": QUANTISED,
    "double_quantization": QUANTISED,
    "pissa_init": "adapters begin at zero",
    "loraplus_lr_ratio": "all adapter matrices have one learning rate",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "resize_vocab": "embeddings are resized where model.new_tokens need it",
    "ref_model": "the reference is the model before the first step",
    "pref_ftx": "no loss of plain fine-tuning is added",
    "rope_scaling": "its factor is made of cutoff_len and the model's context there; set model.rope_scaling, "
    "such as {rope_type: yarn, factor: 4}",
}
_TEXT, _TUNING = "pt", "sft"
"""LLaMA-Factory's stages that learn from texts, and from answers that nobody has judged."""
_JUDGED = [(one, theirs) for one in OBJECTIVES.values() for theirs in one.llamafactory]
"""The objectives that learn from judged answers, each with LLaMA-Factory's names for it."""
_TEMPLATES = {
    name: name for name in ("alpaca", "chatml", "gemma", "llama2", "llama3", "mistral", "qwen3", "vicuna")
} | {"gemma2": "gemma", "phi": "phi3", "qwen": "qwen2.5"}
"""The names of LLaMA-Factory's templates, with their names here."""
_ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}


def translate(t: Translation) -> None:
    """Translate a file of LLaMA-Factory.

    Raises:
        ConfigError: The stage, or the kind of fine-tuning, is not supported.
    """
    if t.take("do_train") is False:
        raise ConfigError("do_train is false: this is no file of a training run")
    t.rename("model_name_or_path", "per_device_train_batch_size", "max_samples", "val_size", "data_seed")
    t.rename(streaming="data.streaming", preprocessing_num_workers="data.workers")
    t.settings.setdefault("train.micro_batch_size", 8)
    t.set("data.seq_len", t.take("cutoff_len", 2048))
    attention = t.take("flash_attn", "auto")
    if attention in _ATTENTION:
        t.set("model.attn_implementation", _ATTENTION[attention])
    elif attention != "auto":
        t.leave_out("flash_attn", attention, "transformers chooses the attention")
    added = t.take("add_tokens", [])
    if added:
        t.set(
            "model.new_tokens",
            [token.strip() for token in added.split(",")] if isinstance(added, str) else added,
        )
    if t.take("enable_liger_kernel"):
        t.set("model.kernels", "liger")
    stage = _stage(t)
    _data(t, stage)
    _adapters(t)
    t.common(schedule="lr_scheduler_type", optimizer="optim")
    t.refuse_rest(_REASONS, _reason)


def _stage(t: Translation) -> str:
    stage = str(t.take("stage", _TUNING))
    if stage in (_TEXT, _TUNING):
        return stage
    found = [each for each in _JUDGED if each[1].method == stage]
    if not found:
        stages = [_TEXT, _TUNING, *dict.fromkeys(theirs.method for _, theirs in _JUDGED)]
        raise ConfigError(
            f"stage is {stage}; megatrain trains {', '.join(stages[:-1])} and {stages[-1]} files"
        )
    kind = t.theirs.get("pref_loss") or "sigmoid"
    for objective, theirs in found:
        if theirs.variant in (None, kind):
            t.preference(objective, theirs)
            return stage
    raise ConfigError(
        f"pref_loss is {kind}; megatrain has {', '.join(str(theirs.variant) for _, theirs in found)}"
    )


def _data(t: Translation, stage: str) -> None:
    registry = str(PurePosixPath(str(t.take("dataset_dir", "data"))) / "dataset_info.json")
    names = names_in(t.take("dataset", []))
    strategy, weights = t.take("mix_strategy", "concat"), t.take("interleave_probs")
    if weights is not None and strategy != "concat":
        shares = [float(share) for share in (weights.split(",") if isinstance(weights, str) else weights)]
        t.set(
            "data.path",
            [
                {"path": registry, "dataset": name, "weight": share}
                for name, share in zip(names, shares, strict=True)
            ],
        )
        t.set("data.mixture_ends", "first_exhausted" if strategy == "interleave_under" else "all_exhausted")
    elif names:
        t.set("data.path", registry)
        t.set("data.dataset", names)
    held_out = names_in(t.take("eval_dataset", []))
    if held_out:
        t.set("data.eval_path", {name: {"path": registry, "dataset": name} for name in held_out})
    template = t.take("template")
    if template is not None and stage != _TEXT:  # texts have no template
        t.chat_template("template", template, _TEMPLATES)
    if t.take("train_on_prompt"):
        t.set("data.train_on", "all")
    elif t.take("mask_history"):
        t.set("data.train_on", "last")
    if stage not in (_TEXT, _TUNING):
        for key in ("packing", "neat_packing"):
            t.leave_out(key, t.take(key), "each answer has a sequence of its own")
        return
    neat, packs = t.take("neat_packing"), t.take("packing", stage == _TEXT)
    packs_examples = packs and stage == _TUNING
    t.set("data.packing", "best_fit" if neat or packs_examples else "join" if packs else "pad")
    if packs_examples and not neat:
        t.leave_out("packing", True, "examples share a sequence, but none sees another, as with neat_packing")


def _adapters(t: Translation) -> None:
    kind = str(t.take("finetuning_type", "lora"))
    rank, alpha = t.take("lora_rank", 8), t.take("lora_alpha")
    target, more = t.take("lora_target", "all"), t.take("additional_target")
    options = {"dropout": t.take("lora_dropout"), "rslora": t.take("use_rslora"), "dora": t.take("use_dora")}
    if kind == "lora":
        t.set("lora.r", rank)
        if alpha is not None:
            t.set("lora.alpha", alpha)
        t.set("lora.target_modules", ["all-linear"] if target == "all" else names_in(target))
        for name, value in options.items():
            if value:
                t.set(f"lora.{name}", value)
        if more:
            t.set("lora.modules_to_save", names_in(more))
    elif kind == "freeze":
        t.leave_out(
            "finetuning_type",
            kind,
            "all parameters are trained; name those that should be in train.only=[PATTERNS]",
        )
    elif kind != "full":
        raise ConfigError(f"finetuning_type is {kind}; megatrain trains full, lora and, by train.only, parts")


def _reason(key: str) -> str:
    for part, what in (("galore", "GaLore"), ("apollo", "APOLLO"), ("badam", "BAdam"), ("muon", "Muon")):
        if part in key:
            return f"the optimizers are those of optim.name; {what} is not there"
    if key.startswith(("pref_", "kto_", "ppo_", "ref_", "reward_", "dpo_", "simpo_")):
        return "it is for preference training alone"
    if key.startswith(("image_", "video_", "audio_", "media_")):
        return "text is trained"
    return "there is nothing like it here"
