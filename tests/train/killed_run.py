"""Trains a run through many kill -9s: `python -m tests.train.killed_run ROOT NUM_KILLS SEED STEPS [WHERE]`.

Everything is imported, counted and compiled once, in a dry run; each attempt is a fork, so that a kill costs
no start-up. With `drives`, the killed run has its state on two drives and no checkpoint before the end, and
`log.txt` says where it went on. With `device`, it has two of its layers on the device and nowhere else. With
`experts`, or `experts on drives`, its experts come in chunks, on drives in those of their own. With `long`,
rows pass in tiles; with `very long`, they have 65,536 tokens. With `soak`, they have 131,072, and what layers
keep is offloaded, in the killed run to drives, where its state is too; `OUT-rss.txt` has the resident bytes
after each step.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatrain.train import loop
from megatrain.train.commands.dry_run import dry_run
from megatrain.train.loop import train
from tests.expert_families import APART
from tests.searches import searched_for_a_moment
from tests.train.project import make_config, write_corpus, write_model_config

ON_DRIVES: dict[str, dict[str, Any]] = {
    "train": {"device": "emulated", "precision": "bf16"},
    "memory": {"activations": "recompute", "lockstep": 2, "fragments": False},
}
IN_RAM: dict[str, dict[str, Any]] = {
    "train": {},
    "checkpoint": {"every": 5},
    "data": {"val_size": 0.05},
    "eval": {"every": 3, "load_best": True},
}


EXPERTS: dict[str, dict[str, Any]] = {
    "train": {"device": "emulated", "precision": "bf16"},
    "memory": {"activations": "recompute", "lockstep": 2, "fragments": False, "expert_chunks": 4},
    "checkpoint": {"every": 5},
}


LONG: dict[str, dict[str, Any]] = {
    "train": {
        "device": "emulated",
        "precision": "bf16",
        "tile_tokens": 96,
        "micro_batch_size": 1,
        "grad_accumulation": 1,
    },
    "data": {"seq_len": 256},
    "memory": {"activations": "keep_attention", "boundaries": "host", "lockstep": 1, "fragments": False},
    "checkpoint": {"every": 1},
}
VERY_LONG = {**LONG, "train": {**LONG["train"], "tile_tokens": 4096}, "data": {"seq_len": 65_536}}
VERY_LONG_MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 64,
}
SOAK: dict[str, dict[str, Any]] = {
    "train": {**LONG["train"], "precision": "fp32", "tile_tokens": 4096},
    "data": {"seq_len": 131_072},
    "memory": {"activations": "offload", "boundaries": "host", "lockstep": 1, "fragments": False},
    "checkpoint": {"every": None},
}
SOAK_RAM = "220MiB"
"""Room for what is staged of activations, and for little of the state."""
SOAK_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "long": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "very long": VERY_LONG_MODEL,
    "soak": SOAK_MODEL,
}


def sections_of(root: Path, out: str, steps: int, *, where: str) -> dict[str, dict[str, Any]]:
    """Return the settings of a run; both runs have the same but for where the state is."""
    sections = {
        "drives": ON_DRIVES,
        "experts": EXPERTS,
        "experts on drives": EXPERTS,
        "long": LONG,
        "very long": VERY_LONG,
        "soak": SOAK,
    }.get(where, IN_RAM)
    chosen = {name: dict(values) for name, values in sections.items()}
    chosen["train"]["steps"] = steps
    if where == "device":
        chosen["train"] |= {"device": "emulated", "precision": "bf16"}
        chosen["memory"] = {"resident_blocks": 0}
        if out == "killed":
            chosen["memory"] = {"resident_blocks": 2, "mirror_resident": False}
    if where.endswith("drives"):
        chosen["checkpoint"] = {"every": None}
        if out == "killed":
            nvme = [str(root / "drive0"), str(root / "drive1")]
            ram = 540_000 if where == "drives" else 1_200_000
            chosen["memory"]["tiers"] = {"ram": ram, "nvme": nvme}
    if where == "soak" and out == "killed":
        nvme = [str(root / "drive0"), str(root / "drive1")]
        chosen["memory"] |= {"boundaries": "nvme", "tiers": {"ram": SOAK_RAM, "nvme": nvme}}
    if where == "experts" and out == "killed":
        chosen["memory"]["expert_chunks"] = 2  # another number goes on with the same bits
    return chosen


def attempt(root: Path, out: str, steps: int, *, where: str) -> int:
    """Run the training in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        if where == "soak":
            note_resident_bytes(root / f"{out}-rss.txt")
        if where.endswith("drives"):
            logging.basicConfig(filename=root / "log.txt", level=logging.INFO)
        train(make_config(root, out, **sections_of(root, out, steps, where=where)))
        code = 0
    finally:
        os._exit(code)


def note_resident_bytes(file: Path) -> None:
    """Write a line after each step of this process: the step, and the bytes that are in memory."""
    step = loop.train_step

    def noted(run: Any) -> Any:
        stats = step(run)
        (line,) = (
            line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
        )
        with file.open("a") as notes:
            notes.write(f"{os.getpid()} {run.step} {1024 * int(line.split()[1])}\n")
        return stats

    loop.train_step = noted


def wait(child: int) -> int:
    """Wait for a child and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def num_rows(run: Path) -> int:
    """Count the steps that a run has noted; after a resume, those that it takes again are written anew."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def usual_step_s(run: Path) -> float:
    """Return the median of the seconds of the steps that a run has noted."""
    return median(json.loads(row)["seconds"] for row in (run / "metrics.jsonl").read_text().splitlines())


def wait_for_rows(child: int, run: Path, number: int) -> None:
    """Wait until a run has noted so many steps, or has ended; its exit status stays for `wait`."""
    while num_rows(run) < number:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.005)


def main(root: Path, num_kills: int, seed: int, steps: int, *, where: str) -> None:
    """Train `whole` once and `killed` through `num_kills` kills at random moments.

    One attempt in four is killed at any moment, the others in the middle of their steps, a few of which they
    have taken, however slow the computer is.
    """
    if where.startswith("experts"):
        (root / "model").mkdir(exist_ok=True)
        write_corpus(root / "corpus.txt")
        config = APART["qwen3_moe"]()
        config.vocab_size = 300
        config.save_pretrained(root / "model")
    if where in MODELS:
        (root / "model").mkdir(exist_ok=True)
        write_corpus(root / "corpus.txt", 100_000 if where == "long" else 300_000)
        write_model_config(
            root / "model", max_position_embeddings=131_072, attention_dropout=0.0, **MODELS[where]
        )
    if where not in ("very long", "soak"):  # whose steps take longer than what a dry run loads
        dry_run(make_config(root, "whole", **sections_of(root, "whole", steps, where=where)), lambda _: None)
    if wait(attempt(root, "whole", steps, where=where)):
        sys.exit("the uninterrupted run failed")
    chance = random.Random(seed)
    most_s = max(0.1, usual_step_s(root / "whole") / 2)
    most_rows = max(1, (steps - 1) // num_kills if where in MODELS else 2 * steps // num_kills)
    kills = late = 0
    while kills < num_kills:
        before = num_rows(root / "killed")
        child = attempt(root, "killed", steps, where=where)
        if kills % 4 != 3:
            wait_for_rows(child, root / "killed", before + chance.randint(1, most_rows))
        time.sleep(chance.uniform(0.0, most_s if kills % 4 != 3 else 1.0))
        os.kill(child, signal.SIGKILL)
        status = wait(child)
        if status == 0:  # it was done before the kill: begin again somewhere else in the run
            os.rename(root / "killed/hf", root / f"finished-{kills}")
            late += 1
        elif status != -signal.SIGKILL:
            sys.exit(f"attempt {kills} failed by itself with {status}")
        kills += 1
    if wait(attempt(root, "killed", steps, where=where)):
        sys.exit("the last attempt failed")
    print(f"{kills} kills in {steps} steps, {late} of them too late")


if __name__ == "__main__":
    with searched_for_a_moment():
        main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), where=sys.argv[5] if sys.argv[5:] else "ram")
