"""The state of a translation: settings by our dotted keys, and the left-out keys with their reasons.

A key of theirs that is given and not obeyed is always named, unless it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.config.aliases import ADAMW
from megatrain.objective.objective import Objective, Theirs

_NOTHING: tuple[Any, ...] = (None, False, "", "none", "no")
"""The values with which a key asks for nothing."""


@dataclass
class Translation:
    """A file of another trainer that becomes settings of ours, key by key."""

    theirs: dict[str, Any]
    """The keys that have not been read yet."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings by our dotted keys."""
    left_out: list[tuple[str, Any, str]] = field(default_factory=list)
    """The left-out keys, each with its value and the reason."""
    newest: tuple[str, Any] = ("", None)
    """The key that was read last, and its value, for the error about a value that cannot be read."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value of theirs, and mark it as read."""
        value = self.theirs.pop(key, None)
        if value is None:
            return default
        self.newest = key, value
        return value

    def set(self, key: str, value: Any) -> None:
        """Set a setting of ours."""
        self.settings[key] = value

    def leave_out(self, key: str, value: Any, reason: str) -> None:
        """Record why a key of theirs is not obeyed, if it asks for something."""
        if value not in _NOTHING and value != [] and value != {}:
            self.left_out.append((key, value, reason))

    def rename(self, names: Mapping[str, str]) -> None:
        """Take over values that mean the same under another name."""
        for theirs, ours in names.items():
            value = self.take(theirs)
            if value is not None:
                self.set(ours, value)

    def refuse_rest(self, reasons: Mapping[str, str], unknown: Callable[[str], str]) -> None:
        """Leave out all unread keys.

        Args:
            reasons: The reasons why keys of this trainer have no meaning here.
            unknown: The reason for any other key.
        """
        for key in list(self.theirs):
            reason = reasons.get(key) or _REASONS.get(key) or unknown(key)
            self.leave_out(key, self.theirs.pop(key), reason)


NEEDLESS_MEMORY = "memory is planned: `megatrain plan` shows where everything goes"
SEVERAL_GPUS = (
    "there is nothing to set: `megatrain train --gpus N` trains on N, which share one state in host memory"
)
OPTIMISER = (
    "of theirs only AdamW is known; optim.state=int8 is what 8-bit AdamW is for (2 of 8 bytes, not exact)"
)
QUANTISED = (
    "the base is never quantised: it waits in host memory in bf16, 2 bytes per parameter, and passes the "
    "device layer by layer"
)
_REASONS = {
    "trust_remote_code": "code in a model directory is never run",
    "gradient_checkpointing": NEEDLESS_MEMORY,
    "deepspeed": SEVERAL_GPUS,
    "fsdp": SEVERAL_GPUS,
    "fsdp_config": SEVERAL_GPUS,
    "hub_model_id": "megatrain export has the switch for it",
}
"""The keys that both trainers have and that have no meaning here, each with the reason."""


def common(t: Translation, *, schedule: str, optimizer: str) -> None:
    """Translate the keys that both have from transformers' TrainingArguments, with the defaults of these.

    Args:
        t: The translation of the file.
        schedule: The key that names the schedule.
        optimizer: The key that names the optimizer.
    """
    t.rename(
        {
            "learning_rate": "optim.lr",
            "adam_epsilon": "optim.eps",
            "output_dir": "out",
            "logging_steps": "log.every",
            "save_total_limit": "checkpoint.keep_last",
            "early_stopping_patience": "eval.patience",
            "load_best_model_at_end": "eval.load_best",
        }
    )
    t.set("train.grad_accumulation", t.take("gradient_accumulation_steps", 1))
    t.set("train.seed", t.take("seed", 42))
    t.set("optim.weight_decay", t.take("weight_decay", 0.0))
    t.set("optim.betas", [t.take("adam_beta1", 0.9), t.take("adam_beta2", 0.999)])
    t.set("optim.max_grad_norm", t.take("max_grad_norm", 1.0) or None)
    t.set("optim.schedule", t.take(schedule, "linear"))
    arguments = t.take("lr_scheduler_kwargs")
    if arguments:
        t.set("optim.schedule_args", arguments)
    name = t.take(optimizer)
    if name is not None and str(name) not in ADAMW:
        t.leave_out(optimizer, name, OPTIMISER)
    _lengths(t)
    _checkpoints(t)
    _precision(t)


def _lengths(t: Translation) -> None:
    steps, epochs = t.take("max_steps", -1), t.take("num_train_epochs", t.take("num_epochs", 3.0))
    if isinstance(steps, (int, float)) and steps <= 0:
        t.set("train.epochs", float(epochs))
    else:
        t.set("train.steps", steps)
    ratio, warmup = t.take("warmup_ratio"), t.take("warmup_steps")
    if warmup:
        t.set("optim.warmup_steps", warmup)
        t.leave_out("warmup_ratio", ratio, "warmup_steps goes first")
    elif ratio:
        t.set("optim.warmup_steps", ratio)


def _checkpoints(t: Translation) -> None:
    saves = t.take("save_strategy")
    if saves == "no":
        t.set("checkpoint.every", None)
    _every(t, "checkpoint.every", "save", saves)
    _every(t, "eval.every", "eval", t.take("eval_strategy", t.take("evaluation_strategy")))
    resume = t.take("resume_from_checkpoint")
    if isinstance(resume, str) and resume != "auto":
        t.leave_out("resume_from_checkpoint", resume, "only checkpoints of megatrain can be gone on from")
    report = t.take("report_to")
    if report not in _NOTHING:
        t.set("log.to", [report] if isinstance(report, str) else report)


def _every(t: Translation, setting: str, kind: str, strategy: Any) -> None:
    every = t.take(f"{kind}_steps")
    reason = f"{setting} is a number of steps, or epoch/N"
    if strategy == "epoch":
        t.set(setting, "epoch")
    elif strategy != "no" and isinstance(every, int) and every >= 1:
        t.set(setting, every)
    elif strategy != "no":
        t.leave_out(f"{kind}_steps", every, reason)
    if strategy not in ("steps", "no", "epoch"):
        t.leave_out(f"{kind}_strategy", strategy, reason)


def _precision(t: Translation) -> None:
    halves = {key: t.take(key) for key in ("bf16", "fp16", "pure_bf16", "bfloat16", "float16")}
    asked = {key for key, value in halves.items() if value not in _NOTHING}
    t.set("train.precision", "bf16" if asked else "fp32")
    if "pure_bf16" in asked:
        t.leave_out("pure_bf16", True, "the masters that AdamW updates are fp32, at the same bytes")
    for key in ("fp16", "float16"):
        if key in asked:
            t.leave_out(key, True, "bf16 is taken, which needs no scaling of losses")


def chat_template(t: Translation, key: str, name: Any, names: Mapping[str, str]) -> None:
    """Translate the name of a chat template.

    Args:
        t: The translation of the file.
        key: The key of theirs that names the template.
        name: The name that the file gives.
        names: The names of their templates that exist here, each with its name here.
    """
    if name in names:
        t.set("data.chat_template", names[name])
        return
    t.leave_out(
        key,
        name,
        "there is no template of that name here, and the tokenizer's own is used; data.chat_template takes a "
        "file of Jinja, and names: see docs/data.md",
    )


def lora_modules(value: Any) -> list[str]:
    """Return names of modules, given as a list or with commas between them."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)


def preference(t: Translation, objective: Objective, theirs: Theirs) -> None:
    """Translate the objective of judged answers, and its settings.

    Args:
        t: The translation of the file.
        objective: The objective that the file asks for.
        theirs: Their names for the objective.
    """
    t.set("train.loss", objective.name)
    for name, value in theirs.sets.items():
        t.set(f"preference.{name}", value)
    for key, name in theirs.keys.items():
        value = t.take(key)
        if name and value is not None:
            t.set(f"preference.{name}", value)
