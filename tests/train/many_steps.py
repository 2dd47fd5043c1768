"""Trains the tiniest model for many steps: `python -m tests.train.many_steps ROOT STEPS`.

It saves in the background every 100 steps, evaluates and writes a text every 500 (or thrice, in a short run),
and watches its memory.
`notes.txt` has a line after every 25th step at which no save is under way: the step, seconds, open
descriptors, threads, and the resident bytes that no file has.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch

from megatrain.train import loop
from megatrain.train.loop import train
from tests.searches import searched_for_a_moment
from tests.train.project import make_config, write_corpus, write_model_config

SAVE_EVERY = 100
EVALUATE_EVERY = 500
NOTE_EVERY = 25
M_ARENA_MAX = -8
"""The number by which glibc's `mallopt` knows the most arenas."""


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory and in no file."""
    status = Path("/proc/self/status").read_text().splitlines()
    (own,) = (line.split()[1] for line in status if line.startswith("RssAnon"))
    return 1024 * int(own)


def noted(notes: IO[str], checkpoints: Path) -> None:
    """Let each step of this process be followed by a note, where it is its turn."""
    step = loop.train_step

    def stepped(run: Any) -> Any:
        row = step(run)
        if run.step % NOTE_EVERY == 0 and not any(checkpoints.glob(".*")):
            descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            numbers = (run.step, f"{time.monotonic():.3f}", descriptors, threads, resident_bytes())
            print(*numbers, file=notes, flush=True)
        return row

    loop.train_step = stepped


def main(root: Path, steps: int) -> None:
    """Train, and leave the notes in `root`."""
    torch.set_num_threads(1)
    # a thread that finds malloc's arenas in use takes another one, which stays: a jump once in many steps
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    logging.basicConfig(level=logging.WARNING)
    write_corpus(root / "corpus.txt", 20_000)
    (root / "model").mkdir()
    write_model_config(
        root / "model", num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=1
    )
    config = make_config(
        root,
        train={"steps": steps, "micro_batch_size": 1, "grad_accumulation": 1},
        data={"seq_len": 16, "val_size": 0.01},
        eval={
            "every": min(EVALUATE_EVERY, steps // 3),
            "batches": 2,
            "prompts": ["one small"],
            "max_new_tokens": 2,
        },
        optim={"lr": 1e-4},
        memory={"watch": 0.5},
        checkpoint={"every": SAVE_EVERY, "background": True},
    )
    with (root / "notes.txt").open("w") as notes:
        noted(notes, root / "run/checkpoints")
        train(config)


if __name__ == "__main__":
    with searched_for_a_moment():
        main(Path(sys.argv[1]), int(sys.argv[2]))
