"""Training files of axolotl: flat keys, data sets as a list of mappings.

Source: its configuration reference and examples, version 0.13 to 0.19.
"""

from __future__ import annotations

from typing import Any

from megatrain.config.foreign.translation import (
    NEEDLESS_MEMORY,
    QUANTISED,
    SEVERAL_GPUS,
    Translation,
    names_in,
)
from megatrain.errors import ConfigError
from megatrain.objective.registry import OBJECTIVES

_REASONS = {
    "model_type": "the class is the one that config.json names",
    "tokenizer_type": "the tokenizer is the directory's own",
    "strict": "unknown keys are always an error",
    "dataset_prepared_path": "prepared data is kept and found again by itself; data.cache says where",
    "dataset_processes": "data.workers is the number of processes that tokenise",
    "eval_sample_packing": "data.packing is for evaluation too",
    "pad_to_sequence_len": "sequences are as long as what is in them",
    "group_by_length": "sequences are full, so there is nothing to group",
    "special_tokens": "the tokens that begin, end and fill are the tokenizer's own: change them in a copy of "
    "it, and give that as data.tokenizer; what fills a row is neither seen nor trained on",
    "gradient_checkpointing_kwargs": NEEDLESS_MEMORY,
    "activation_offloading": NEEDLESS_MEMORY,
    "layer_offloading": NEEDLESS_MEMORY,
    "fsdp_version": SEVERAL_GPUS,
    "tensor_parallel_size": SEVERAL_GPUS,
    "load_in_8bit": QUANTISED,
    "load_in_4bit": QUANTISED,
    "tf32": "precision is fp32 or bf16",
    "eval_batch_size": "evaluation takes train.micro_batch_size",
    "eval_table_size": "eval.prompts are continued at each evaluation",
    "eval_max_new_tokens": "eval.max_new_tokens is for eval.prompts",
    "wandb_entity": "WANDB_ENTITY in the environment says it",
    "wandb_name": "WANDB_NAME in the environment says it",
    "wandb_watch": "gradients are not there to be watched",
    "wandb_log_model": "WANDB_LOG_MODEL in the environment says it",
    "save_first_step": "checkpoint.every is a number of steps, or epoch/N",
    "save_safetensors": "files are always safetensors",
    "train_on_eos": "the end of each turn that is trained on is trained on",
    "lora_model_dir": "adapters begin anew; merge the old ones into the model first",
    "qlora_sharded_model_loading": QUANTISED,
    "auto_resume_from_checkpoints": "the same command goes on from the newest checkpoint",
    "debug": "megatrain --debug shows tracebacks",
}
_FORMATS = {
    "alpaca": "alpaca",
    "alpaca_chat": "alpaca",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
}
_COLUMNS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_messages": "messages",
    "field_tools": "tools",
    "field": "text",
}
_METHODS = {theirs.method: (one, theirs) for one in OBJECTIVES.values() for theirs in one.axolotl}
"""The objectives that learn from judged answers, by axolotl's names for them."""
_TEMPLATES = {name: name for name in ("alpaca", "chatml", "gemma", "llama3", "qwen3")} | {
    "mistral_v2v3": "mistral",
    "phi_3": "phi3",
    "phi_35": "phi3",
    "qwen_25": "qwen2.5",
}
"""The names of axolotl's templates, with their names here."""
_TAGS = {"role": "role_tag", "content": "content_tag"}


def translate(t: Translation) -> None:
    """Translate a file of axolotl.

    Raises:
        ConfigError: Preference training uses a loss that is not supported.
    """
    method = t.take("rl")
    if method is not None:
        if method not in _METHODS:
            raise ConfigError(f"rl is {method}; megatrain has {', '.join(_METHODS)}")
        t.preference(*_METHODS[method])
    t.rename(
        base_model="model.path",
        tokenizer_config="data.tokenizer",
        tokens="model.new_tokens",
        micro_batch_size="train.micro_batch_size",
        val_set_size="data.val_size",
        streaming="data.streaming",
    )
    t.rename("attn_implementation")
    t.settings.setdefault("train.micro_batch_size", 1)
    t.set("data.seq_len", t.take("sequence_len", 512))
    packs = t.take("sample_packing")
    if packs and method is not None:
        t.leave_out("sample_packing", packs, "each answer has a sequence of its own")
    t.set("data.packing", "best_fit" if packs and method is None else "pad")
    if t.take("shuffle_merged_datasets") is False:
        t.set("data.shuffle", False)
    for key, name in (
        ("flash_attention", "flash_attention_2"),
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
    ):
        if t.take(key):
            t.set("model.attn_implementation", name)
    kernels = [t.take(key) for key in list(t.theirs) if key.startswith("liger_")]
    if any(kernels):
        t.set("model.kernels", "liger")
    _data(t)
    _adapters(t)
    least = t.take("cosine_min_lr_ratio")
    watchdog = [t.take(key) for key in ("loss_watchdog_threshold", "loss_watchdog_patience")]
    if watchdog != [None, None]:
        t.set("train.on_spike", "stop")
        t.leave_out(
            "loss_watchdog_threshold",
            "given",
            "train.on_spike=stop is set: it ends the run at a loss far above the last 64",
        )
    t.theirs.setdefault("num_epochs", 1)
    t.common(schedule="lr_scheduler", optimizer="optimizer")
    if least is not None and t.settings["optim.schedule"] == "cosine":
        t.set("optim.schedule", "cosine_with_min_lr")
        t.set("optim.schedule_args", {"min_lr_rate": least})
    _times(t)
    if t.take("wandb_project"):
        t.set("log.to", ["wandb"])
        t.leave_out(
            "wandb_project", "given", "log.to=[wandb] is set; WANDB_PROJECT in the environment names it"
        )
    t.refuse_rest(_REASONS, lambda key: "there is nothing like it here")


def _data(t: Translation) -> None:
    sources = t.take("datasets", t.take("pretraining_dataset", []))
    found = [_source(t, source) for source in ([sources] if isinstance(sources, (str, dict)) else sources)]
    if found:
        t.set("data.path", found)
    held_out = t.take("test_datasets", [])
    if held_out:
        t.set("data.eval_path", {f"eval{n}": _source(t, source) for n, source in enumerate(held_out)})
    if t.take("train_on_inputs"):
        t.set("data.train_on", "all")
    template, jinja = t.take("chat_template"), t.take("chat_template_jinja")
    if jinja is not None and str(jinja).endswith(".jinja"):
        t.set("data.chat_template", jinja)
    else:
        t.leave_out("chat_template_jinja", jinja, "write it to a file, and give that as data.chat_template")
        if template not in (None, "tokenizer_default", "jinja"):
            t.chat_template("chat_template", template, _TEMPLATES)


def _source(t: Translation, source: Any) -> dict[str, Any]:
    if isinstance(source, str):
        return {"path": source}
    given = {key: value for key, value in source.items() if value not in (None, "", [], {})}
    made: dict[str, Any] = {"path": given.pop("path", None)}
    files = given.pop("data_files", None)
    if files:
        made["path"] = files if isinstance(files, str) else files[0]
        if not isinstance(files, str) and len(files) > 1:
            t.leave_out("datasets.data_files", files[1:], "each file is a source of its own in data.path")
    kind = given.pop("type", None)
    base = kind.partition(".")[0] if isinstance(kind, str) else None
    if base in _FORMATS:
        made["format"] = _FORMATS[base]
        if made["format"] == "alpaca" and t.theirs.get("chat_template") != "alpaca":
            t.leave_out(
                "datasets.type",
                kind,
                "rows are read so, and written in the words of the chat template; data.chat_template=alpaca "
                "writes Alpaca's, without its heading for inputs",
            )
    elif kind is not None:
        t.leave_out("datasets.type", kind, "what a row holds is found from its columns; data.format says it")
    for theirs, ours in (("split", "split"), ("name", "subset"), ("revision", "revision")):
        if theirs in given:
            made[ours] = given.pop(theirs)
    columns = {ours: given.pop(theirs) for theirs, ours in _COLUMNS.items() if theirs in given}
    if columns:
        made["columns"] = columns
    mappings = given.pop("message_property_mappings", {})
    mappings |= {
        name: given.pop(key)
        for key, name in (("message_field_role", "role"), ("message_field_content", "content"))
        if key in given
    }
    tags = {_TAGS[name]: value for name, value in mappings.items() if name in _TAGS and value != name}
    if tags:
        made["tags"] = tags
    roles = given.pop("roles_to_train", None)
    if roles not in (None, ["assistant"]):
        t.set("data.train_on", roles)
    for key in ("ds_type", "train_on_eos"):
        given.pop(key, None)
    for key, value in given.items():
        t.leave_out(f"datasets.{key}", value, "a source has no such setting")
    return made


def _adapters(t: Translation) -> None:
    kind = t.take("adapter")
    values = {
        "lora.r": t.take("lora_r", 8),
        "lora.alpha": t.take("lora_alpha"),
        "lora.dropout": t.take("lora_dropout"),
        "lora.dora": t.take("peft_use_dora"),
        "lora.rslora": t.take("peft_use_rslora"),
        "lora.modules_to_save": t.take("lora_modules_to_save"),
    }
    is_linear, modules = t.take("lora_target_linear"), t.take("lora_target_modules")
    if kind not in ("lora", "qlora"):
        t.leave_out("adapter", kind, "adapters are LoRA")
        return
    if kind == "qlora":
        t.leave_out("adapter", kind, f"lora is taken: {QUANTISED}")
    for key, value in values.items():
        if value:
            t.set(key, value)
    t.set("lora.target_modules", ["all-linear"] if is_linear or not modules else names_in(modules))


def _times(t: Translation) -> None:
    """Read how often in an epoch the run saves and evaluates."""
    for key, name in (("saves_per_epoch", "checkpoint.every"), ("evals_per_epoch", "eval.every")):
        times = t.take(key)
        if times:
            t.set(name, "epoch" if times == 1 else f"epoch/{times}")
