"""TRL's SFTTrainer with a resident model, and ours with the streamed one: every step's figures, bit for bit.

    python -m benchmarks.training.trl_curves [--data DIR] [--steps N] [--sets NAME ...] [--lora]
        [--against trainer loop] [--out FILE]

A pretrained model of 260,000 parameters is fine-tuned on GSM8K and on LLaMA-Factory's alpaca_en_demo, in
fp32, without clipping, with accumulation 4 and an evaluation every 100 steps. Both trainers run TRL's own
loss on the same batches and seeds; ours streams every layer and passes the micro-batches of a step in
lockstep. `--lora` trains adapters of rank 16 on all projections.

`--against loop` holds the loop of `megatrain train`, with its own loss, against TRL's trainer, on the batches
that that one has seen and from the weights that it began with. The losses agree to rounding; how far rounding
alone leads is shown beside it, by TRL's trainer once more, with its head in chunks of other sizes.

DIR is the directory with `stories260K/hf`, `gsm8k/train.jsonl` and `llamafactory/alpaca_en_demo.json`.
The last line of stdout, and FILE, have each run's curves (loss, entropy, accuracy, tokens). The script fails
if a logged figure other than the norm, or a bit of a trained weight, differs, or a norm by more than 1e-6,
or a loss of our loop by more than 5e-6 of it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils as trl_utils

from benchmarks.report import emit, hardware
from megatrain import Choice
from megatrain.config import build_config
from megatrain.hf import MegatrainArguments, StreamingSFTTrainer
from megatrain.train.loop import train_step
from megatrain.train.run import Run, prepare

LR, WARMUP_STEPS, RANK, ALPHA, SEQ_LEN = 1e-3, 20, 16, 8, 128
OTHER_CHUNK = 128
"""Words of the vocabulary in one product of TRL's head; the model has 512, by default in one."""
MOST_LOOP_DIFFERENCE = 5e-6

DATA = Path(__file__).parents[3] / "shared/data"
SHOWN = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_entropy", "learning_rate")


def gsm8k(data: Path, cache: str) -> Dataset:
    """Read questions as prompts and answers as completions."""
    rows = Dataset.from_json(str(data / "gsm8k/train.jsonl"), cache_dir=cache)
    return rows.rename_columns({"question": "prompt", "answer": "completion"})


def alpaca(data: Path, cache: str) -> Dataset:
    """Read instructions, with their inputs, as prompts and outputs as completions."""
    rows = Dataset.from_json(str(data / "llamafactory/alpaca_en_demo.json"), cache_dir=cache)

    def join(row: dict[str, str]) -> dict[str, str]:
        prompt = "\n".join(filter(None, (row["instruction"], row["input"])))
        return {"prompt": prompt + "\n", "completion": row["output"]}

    return rows.map(join, remove_columns=rows.column_names)


SETS = {"gsm8k": gsm8k, "alpaca_en_demo": alpaca}


class Recorded(SFTTrainer):
    """TRL's trainer, which keeps the weights that it begins with, and the batches that it is given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps: list[list[dict[str, torch.Tensor]]] = []
        self.first = {
            name.removeprefix("base_model.model."): value.detach().clone()
            for name, value in self.model.named_parameters()
            if value.requires_grad
        }

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the batches of a step, before the loss changes them."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        self.steps.append([dict(batch) for batch in batches])
        return batches, count


class Replayed:
    """Gives a run's steps the batches that another has had."""

    def __init__(self, steps: Sequence[list[dict[str, torch.Tensor]]]) -> None:
        self._steps = iter(steps)
        self.num_tokens = self.num_batches = 0

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        """Return the next step's micro-batches."""
        batches = next(self._steps)
        self.num_batches = len(batches)
        self.num_tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        return batches


def make(data: Path, rows: Dataset, directory: Path, num_steps: int, *, streams: bool, lora: bool) -> Any:
    """Make the trainer of one of the two sides."""
    args = SFTConfig(
        output_dir=str(directory),
        max_steps=num_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_length=SEQ_LEN,
        learning_rate=LR,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP_STEPS,
        max_grad_norm=0.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=100,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        optim="adamw_torch_fused",
        seed=0,
    )
    source = data / "stories260K/hf"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    shared: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": rows.select(range(len(rows) - 32)),
        "eval_dataset": rows.select(range(len(rows) - 32, len(rows))),
        "processing_class": AutoTokenizer.from_pretrained(source),
    }
    if lora:
        from peft import LoraConfig

        shared["peft_config"] = LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear"
        )
    torch.manual_seed(0)  # adapters are drawn before the trainer sets its seed
    if not streams:
        return Recorded(**shared)
    choice = Choice(lockstep=4, resident_layers=0, activations="recompute")
    return StreamingSFTTrainer(**shared, megatrain=MegatrainArguments(choice=choice))


def timed(trainer: Any) -> float:
    """Train, and return the seconds it took."""
    begin = time.perf_counter()
    trainer.train()
    return time.perf_counter() - begin


def losses_of_our_loop(data: Path, directory: Path, theirs: Recorded, *, lora: bool) -> list[float]:
    """Train in our own loop what TRL's trainer has trained, and return the loss of each step."""
    text = directory / "unread.txt"
    text.write_text("The batches are those of the other side. " * 200)
    config = build_config(
        {
            "model": {"path": str(data / "stories260K/hf")},
            "data": {"path": str(text), "seq_len": SEQ_LEN},
            "train": {
                "steps": len(theirs.steps),
                "micro_batch_size": 2,
                "grad_accumulation": 4,
                "precision": "fp32",
                "device": "cpu",
            },
            "optim": {
                "lr": LR,
                "betas": [0.9, 0.999],
                "weight_decay": 0.0,
                "max_grad_norm": None,
                "schedule": "cosine",
                "warmup_steps": WARMUP_STEPS,
            },
            "lora": {"r": RANK, "alpha": ALPHA} if lora else {},
            "out": str(directory / "run"),
        }
    )
    run = prepare(config)
    for name, value in theirs.first.items():
        run.engine.host.put(name, value)
    run.engine.weights_changed()
    run.loader = replayed = Replayed(theirs.steps)  # type: ignore[assignment]

    def seeds(_: Run) -> list[int]:
        return [0] * replayed.num_batches  # an epoch's last step may have fewer; nothing is drawn by them

    with mock.patch.object(Run, "micro_batch_seeds", seeds):
        losses = [train_step(run).loss for _ in theirs.steps]
    run.engine.close()
    return losses


def furthest(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference between two curves."""
    return max(abs(a - b) / a for a, b in zip(some, others, strict=True))


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return a trainer's weights after every update."""
    if hasattr(trainer, "engine"):
        trainer.engine.sync()
    return dict(trainer.model.named_parameters())


def curves(trainer: Any) -> dict[str, list[float]]:
    """Return what a trainer has logged, by name."""
    found: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for key, value in entry.items():
            if key in SHOWN or key == "grad_norm":
                found.setdefault(key, []).append(value)
    return found


def compare(data: Path, name: str, num_steps: int, against: Sequence[str], *, lora: bool) -> dict[str, Any]:
    """Train on one data set with TRL's trainer and with ours, and hold them against each other."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        rows = SETS[name](data, str(root / "cache"))
        theirs = make(data, rows, root / "trl", num_steps, streams=False, lora=lora)
        found = {"data": name, "lora": lora, "steps": num_steps, "resident_s": timed(theirs)}
        if "trainer" in against:
            ours = make(data, rows, root / "ours", num_steps, streams=True, lora=lora)
            found |= {"streamed_s": timed(ours)} | trainers_compared(theirs, ours)
        if "loop" in against:
            loss = curves(theirs)["loss"]
            own = losses_of_our_loop(data, root, theirs, lora=lora)
            again = make(data, rows, root / "again", num_steps, streams=False, lora=lora)
            with mock.patch.object(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", OTHER_CHUNK):
                timed(again)
            found |= {
                "loop_losses": own,
                "max_loop_difference": furthest(loss, own),
                "max_difference_of_other_chunks": furthest(loss, curves(again)["loss"]),
            }
    return found


def trainers_compared(theirs: Any, ours: Any) -> dict[str, Any]:
    """Return our trainer's curves, and what differs from those and the weights of the other."""
    a, b = curves(theirs), curves(ours)
    norms = a.pop("grad_norm"), b.pop("grad_norm")
    own = weights(ours)
    return {
        "curves": b,
        "differing_curves": [key for key in a if a[key] != b[key]],
        "differing_weights": [k for k, value in weights(theirs).items() if not torch.equal(value, own[k])],
        "trained_weights": sum(p.numel() for p in own.values() if p.requires_grad),
        "max_norm_error": furthest(*norms),
    }


def problems(run: dict[str, Any]) -> list[str]:
    """Say what in a comparison is not as it has to be."""
    found = [*run.get("differing_curves", ()), *run.get("differing_weights", ())]
    if run.get("max_norm_error", 0) > 1e-6:
        found.append("norm")
    if run.get("max_loop_difference", 0) > MOST_LOOP_DIFFERENCE:
        found.append("our loop's loss")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--against", nargs="+", choices=["trainer", "loop"], default=["trainer"])
    parser.add_argument("--out")
    given = parser.parse_args()
    runs = [compare(given.data, name, given.steps, given.against, lora=given.lora) for name in given.sets]
    emit({"hardware": hardware(), "runs": runs}, given.out)
    for run in runs:
        if found := problems(run):
            raise SystemExit(f"{run['data']}: the two sides differ: {', '.join(found)}")


if __name__ == "__main__":
    main()
