"""The state of a translation: settings by our dotted keys, and the left-out keys with their reasons.

A key of theirs that is given and not obeyed is always named, unless it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.config.aliases import ADAMW, ALIASES
from megatrain.objective.objective import Objective, Theirs

_NOTHING: tuple[Any, ...] = (None, False, "", "none", "no")
"""The values with which a key asks for nothing."""

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

    def rename(self, *known: str, **others: str) -> None:
        """Take over values that mean the same under another name: one of `ALIASES`, or one that is given."""
        for theirs, ours in ({name: ALIASES[name] for name in known} | others).items():
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

    def common(self, *, schedule: str, optimizer: str) -> None:
        """Translate the keys that both have from transformers' TrainingArguments, with the defaults of these.

        Args:
            schedule: The key that names the schedule.
            optimizer: The key that names the optimizer.
        """
        self.rename("learning_rate", "adam_epsilon", "output_dir", "logging_steps", "save_total_limit")
        self.rename("early_stopping_patience", "load_best_model_at_end")
        self.set("train.grad_accumulation", self.take("gradient_accumulation_steps", 1))
        self.set("train.seed", self.take("seed", 42))
        self.set("optim.weight_decay", self.take("weight_decay", 0.0))
        self.set("optim.betas", [self.take("adam_beta1", 0.9), self.take("adam_beta2", 0.999)])
        self.set("optim.max_grad_norm", self.take("max_grad_norm", 1.0) or None)
        self.set("optim.schedule", self.take(schedule, "linear"))
        arguments = self.take("lr_scheduler_kwargs")
        if arguments:
            self.set("optim.schedule_args", arguments)
        name = self.take(optimizer)
        if name is not None and str(name) not in ADAMW:
            self.leave_out(optimizer, name, OPTIMISER)
        self._lengths()
        self._checkpoints()
        self._precision()

    def _lengths(self) -> None:
        steps = self.take("max_steps", -1)
        epochs = self.take("num_train_epochs", self.take("num_epochs", 3.0))
        if isinstance(steps, (int, float)) and steps <= 0:
            self.set("train.epochs", float(epochs))
        else:
            self.set("train.steps", steps)
        ratio, warmup = self.take("warmup_ratio"), self.take("warmup_steps")
        if warmup:
            self.set("optim.warmup_steps", warmup)
            self.leave_out("warmup_ratio", ratio, "warmup_steps goes first")
        elif ratio:
            self.set("optim.warmup_steps", ratio)

    def _checkpoints(self) -> None:
        saves = self.take("save_strategy")
        if saves == "no":
            self.set("checkpoint.every", None)
        self._every("checkpoint.every", "save", saves)
        self._every("eval.every", "eval", self.take("eval_strategy", self.take("evaluation_strategy")))
        resume = self.take("resume_from_checkpoint")
        if isinstance(resume, str) and resume != "auto":
            self.leave_out(
                "resume_from_checkpoint", resume, "only checkpoints of megatrain can be gone on from"
            )
        report = self.take("report_to")
        if report not in _NOTHING:
            self.set("log.to", [report] if isinstance(report, str) else report)

    def _every(self, setting: str, kind: str, strategy: Any) -> None:
        every = self.take(f"{kind}_steps")
        reason = f"{setting} is a number of steps, or epoch/N"
        if strategy == "epoch":
            self.set(setting, "epoch")
        elif strategy != "no" and isinstance(every, int) and every >= 1:
            self.set(setting, every)
        elif strategy != "no":
            self.leave_out(f"{kind}_steps", every, reason)
        if strategy not in ("steps", "no", "epoch"):
            self.leave_out(f"{kind}_strategy", strategy, reason)

    def _precision(self) -> None:
        halves = {key: self.take(key) for key in ("bf16", "fp16", "pure_bf16", "bfloat16", "float16")}
        asked = {key for key, value in halves.items() if value not in _NOTHING}
        self.set("train.precision", "bf16" if asked else "fp32")
        if "pure_bf16" in asked:
            self.leave_out("pure_bf16", True, "the masters that AdamW updates are fp32, at the same bytes")
        for key in ("fp16", "float16"):
            if key in asked:
                self.leave_out(key, True, "bf16 is taken, which needs no scaling of losses")

    def chat_template(self, key: str, name: Any, names: Mapping[str, str]) -> None:
        """Translate the name of a chat template.

        Args:
            key: The key of theirs that names the template.
            name: The name that the file gives.
            names: The names of their templates that exist here, each with its name here.
        """
        if name in names:
            self.set("data.chat_template", names[name])
            return
        self.leave_out(
            key,
            name,
            "there is no template of that name here, and the tokenizer's own is used; data.chat_template "
            "takes a file of Jinja, and names: see docs/data.md",
        )

    def preference(self, objective: Objective, theirs: Theirs) -> None:
        """Translate the objective of judged answers, and its settings.

        Args:
            objective: The objective that the file asks for.
            theirs: Their names for the objective.
        """
        self.set("train.loss", objective.name)
        for name, value in theirs.sets.items():
            self.set(f"preference.{name}", value)
        for key, name in theirs.keys.items():
            value = self.take(key)
            if name and value is not None:
                self.set(f"preference.{name}", value)


def names_in(value: Any) -> list[str]:
    """Return names, given as a list or with commas between them."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
