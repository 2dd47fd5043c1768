"""TRL's SFTTrainer with a resident model, and ours with the streamed one: every step's figures, bit for bit.

    python -m benchmarks.training.trl_curves [--data DIR] [--steps N] [--sets NAME ...] [--lora] [--out FILE]

A pretrained model of 260,000 parameters is fine-tuned on GSM8K and on LLaMA-Factory's alpaca_en_demo, in
fp32, without clipping, with accumulation 4 and an evaluation every 100 steps. Both trainers run TRL's own
loss on the same batches and seeds; ours streams every layer and passes the micro-batches of a step in
lockstep. `--lora` trains adapters of rank 16 on all projections.

DIR is the directory with `stories260K/hf`, `gsm8k/train.jsonl` and `llamafactory/alpaca_en_demo.json`.
The last line of stdout, and FILE, have each run's curves (loss, entropy, accuracy, tokens). The script fails
if a logged figure other than the norm, or a bit of a trained weight, differs, or a norm by more than 1e-6.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.report import emit, hardware
from megatrain import Choice
from megatrain.hf import MegatrainArguments, StreamingSFTTrainer

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


def train(
    data: Path, rows: Dataset, directory: Path, num_steps: int, *, streams: bool, lora: bool
) -> tuple[Any, float]:
    """Train one of the two sides, and return its trainer and the seconds it took."""
    args = SFTConfig(
        output_dir=str(directory),
        max_steps=num_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_length=128,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
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

        shared["peft_config"] = LoraConfig(r=16, lora_dropout=0.0, target_modules="all-linear")
    if streams:
        choice = Choice(lockstep=4, resident_layers=0, activations="recompute")
        trainer = StreamingSFTTrainer(**shared, megatrain=MegatrainArguments(choice=choice))
    else:
        trainer = SFTTrainer(**shared)
    begin = time.perf_counter()
    trainer.train()
    return trainer, time.perf_counter() - begin


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


def compare(data: Path, name: str, num_steps: int, *, lora: bool) -> dict[str, Any]:
    """Train both sides on one data set, and hold them against each other."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        rows = SETS[name](data, str(root / "cache"))
        theirs, resident_s = train(data, rows, root / "trl", num_steps, streams=False, lora=lora)
        ours, streamed_s = train(data, rows, root / "ours", num_steps, streams=True, lora=lora)
    a, b = curves(theirs), curves(ours)
    norms = zip(a.pop("grad_norm"), b.pop("grad_norm"), strict=True)
    own = weights(ours)
    differing = [key for key, value in weights(theirs).items() if not torch.equal(value, own[key])]
    return {
        "data": name,
        "lora": lora,
        "steps": num_steps,
        "curves": b,
        "differing_curves": [key for key in a if a[key] != b[key]],
        "differing_weights": differing,
        "trained_weights": sum(p.numel() for p in own.values() if p.requires_grad),
        "max_norm_error": max(abs(x - y) / x for x, y in norms),
        "resident_s": resident_s,
        "streamed_s": streamed_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    runs = [compare(given.data, name, given.steps, lora=given.lora) for name in given.sets]
    emit({"hardware": hardware(), "runs": runs}, given.out)
    for run in runs:
        if run["differing_curves"] or run["differing_weights"] or run["max_norm_error"] > 1e-6:
            raise SystemExit(f"{run['data']}: the two sides differ: {run['differing_curves']}")


if __name__ == "__main__":
    main()
