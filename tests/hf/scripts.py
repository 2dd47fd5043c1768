"""A user's script that trains, as every rank runs it, and tells what has come of it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatrain.store.placement import Tiers
from tests.hf.setups import arguments, logged, planned, rows, tiny, weights


def train(
    ranks: None,
    *,
    out: str,
    kind: str = "plain",
    accumulation: int,
    shards: int | None = None,
    resume: str | None = None,
    lora: bool = False,
    differs: dict[str, Any] | None = None,
    dies_at: int | None = None,
    saves_for_s: float = 0.0,
    fields: dict[str, Any] | None = None,
    drives: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train with one of our trainers.

    Args:
        ranks: None: the script knows nothing of them.
        out: Directory of the run.
        kind: Of trainer: `plain`, `sft`, `dpo` or `kto`.
        accumulation: Micro-batches of a step, of each rank.
        shards: As in `MegatrainArguments`.
        resume: Checkpoint to go on from.
        lora: An adapter is trained.
        differs: Of rank 1, `changes` that the others do not have; `rows`: the seed of its data.
        dies_at: Step after which rank 1 ends.
        saves_for_s: How much longer the first rank takes to begin a checkpoint.
        fields: Of the `Choice`.
        drives: A directory, where all state but the largest block's is, and most weights; None: in RAM.
        changes: Of the arguments.
    """
    import os

    rank = int(os.environ.get("RANK", "0"))
    other = (differs or {}) if rank == 1 else {}
    seed = other.pop("rows", 0)
    settings = {
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": accumulation,
        **changes,
        **other,
    }
    model = tiny()
    megatrain = replace(planned(model, **{"lockstep": 2, **(fields or {})}), shards=shards)
    if drives is not None:
        tiers = Tiers(nvme=(Path(drives),), ram=1 << 30, weights_in_ram=2, blocks_in_ram=1)
        megatrain = replace(megatrain, tiers=tiers)
    trainer_kind, config, data = _of_kind(kind, seed, lora=lora)
    args = arguments(Path(out), config, **settings)
    trainer = trainer_kind(model=model, args=args, megatrain=megatrain, **data)
    if dies_at is not None and rank == 1:
        trainer.add_callback(_dying(dies_at))
    if saves_for_s and rank == 0:
        save = trainer.save_model

        def save_slowly(*given: Any, **named: Any) -> None:
            time.sleep(saves_for_s)
            save(*given, **named)

        trainer.save_model = save_slowly
    trainer.train(resume_from_checkpoint=resume)
    told: dict[str, Any] = {
        "logged": logged(trainer),
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "weights": _digest(weights(trainer)),
        "is_first": trainer.is_world_process_zero(),
        "accumulation": trainer.args.gradient_accumulation_steps,
    }
    trainer.engine.close()
    return told


def train_all(ranks: None, *, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train one after another, as `train`, by name."""
    return {name: train(ranks, **settings) for name, settings in runs.items()}


train.is_script = train_all.is_script = True  # type: ignore[attr-defined]


def _of_kind(kind: str, seed: int, *, lora: bool) -> tuple[Any, Any, dict[str, Any]]:
    if kind == "plain":
        from transformers import TrainingArguments

        from megatrain.hf import StreamingTrainer

        return (
            StreamingTrainer,
            TrainingArguments,
            {"train_dataset": rows(seed=seed), "eval_dataset": rows(7)},
        )
    more: dict[str, Any] = {}
    if lora:
        import peft

        more["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    if kind == "sft":
        from tests.hf.setups import tokenizer
        from tests.hf.test_sft import KINDS, prompts

        data = {"train_dataset": prompts(), "eval_dataset": prompts(7), "processing_class": tokenizer()}
        return KINDS[1], KINDS[2], {**data, **more}
    from tests.hf.test_preferences import KINDS as JUDGED
    from tests.hf.test_preferences import data as judged

    _, ours, config = JUDGED[kind]
    return ours, config, judged(kind, **more)


def _dying(step: int) -> Any:
    import os
    import signal

    from transformers import TrainerCallback

    class Dying(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

    return Dying()


def _digest(tensors: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
