"""Makes the checkpoints of `data/` anew with the code of this checkout.

    python -m tests.train.golden.make

They are of a version that was, so they are made once, and never because a test has failed: a format that a
later version cannot read, or reads to other bits, is a fault of that version. A further case is added to
`CASES`; the command leaves those alone that are there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.config import load_config
from megatrain.data.tokenizer import train_tokenizer
from megatrain.train.loop import train
from tests.train.golden.cases import (
    CASES,
    CHECKPOINT,
    DATA,
    SAME_CHECKPOINT,
    SAVED,
    came_out,
    go_on,
    kernels,
    laid_out,
    settings_of,
)
from tests.train.project import WORDS, write_corpus


def main() -> None:
    """Make what is not there yet."""
    torch.set_num_threads(1)
    if not (DATA / "model").exists():
        make_shared()
    file = DATA / "digests.json"
    kept: dict[str, Any] = (
        json.loads(file.read_text()) if file.exists() else {"kernels": kernels(), "runs": {}}
    )
    own = kernels()
    for name in CASES:
        if name not in kept["runs"]:
            kept["runs"][name] = make(name) | ({} if own == kept["kernels"] else {"kernels": own})
            file.write_text(json.dumps(kept, indent=1) + "\n")


def make_shared() -> None:
    """Write the model and the data."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attention_dropout=0.1,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(DATA / "model")
    train_tokenizer([" ".join(WORDS)] * 20, 300).save_pretrained(DATA / "model")
    write_corpus(DATA / "text.txt", 600)
    chance = random.Random(1)

    def words(count: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(count))

    pairs = [{"prompt": words(3), "chosen": f" {words(4)}", "rejected": f" {words(2)}"} for _ in range(20)]
    judged = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0}
        for n, row in enumerate(pairs)
    ]
    for name, rows in (("dpo", pairs), ("kto", judged)):
        (DATA / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(name: str) -> dict[str, Any]:
    """Train a case, keep its checkpoint, and return what going on from it gives."""
    (DATA / name).mkdir(exist_ok=True)
    settings = yaml.safe_dump(settings_of(name), sort_keys=False)
    (DATA / name / "config.yaml").write_text(settings)
    with laid_out(name) as root:
        whole = train(load_config("config.yaml"), resume="no")
        expected = came_out(root / whole)
        saved = root / whole / "checkpoints" / f"step-{SAVED:08d}"
        if name not in SAME_CHECKPOINT:
            shutil.copytree(saved, DATA / name / CHECKPOINT)
    with laid_out(name) as root:
        found = go_on(root)
    assert {key: found[key] for key in expected} == expected, (
        "a run that goes on differs from one that was not stopped"
    )
    return found


if __name__ == "__main__":
    main()
