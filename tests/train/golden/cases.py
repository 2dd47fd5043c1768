"""The runs whose checkpoints are kept, and how one of them goes on.

`data/` holds what all of them train (a Llama of 3,600 parameters in fp32, a text, pairs and judged answers),
and by run its settings as they were written and its checkpoint after 2 of 4 steps. `digests.json` beside them
says what the version that wrote them made of each: every plane as it was loaded, and losses and planes after
the two steps that were left. `settings.yaml` has every key of that version.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import dropout, linear, logsigmoid
from transformers import AutoModelForCausalLM

from megatrain.config import load_config
from megatrain.train import loop
from megatrain.train.loop import train
from megatrain.train.resume.state import write_state
from tests.train.test_loop import rows_of

DATA = Path(__file__).parent / "data"
SHARED = ("model", "text.txt", "dpo.jsonl", "kto.jsonl")
CHECKPOINT = "checkpoint"
SAVED, STEPS = 2, 4

_PAIRS: dict[str, Any] = {
    "data": {"path": "dpo.jsonl"},
    "train": {"loss": "dpo"},
    "preference": {"beta": 0.2, "loss_type": "robust", "label_smoothing": 0.1},
}
_JUDGED: dict[str, Any] = {
    "data": {"path": "kto.jsonl"},
    "train": {"loss": "kto"},
    "preference": {"desirable_weight": 1.5, "undesirable_weight": 0.5},
}
_BF16: dict[str, Any] = {"train": {"precision": "bf16"}}
_DRIVES: dict[str, Any] = {"activations": "recompute", "tiers": {"ram": "200KiB", "nvme": ["drive"]}}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"train": {"precision": "fp32"}},
    "bf16": {**_BF16, "parallel": {"shards": 2}},
    "bf16-moments": {**_BF16, "optim": {"state": "bf16"}},
    "int8-moments": {**_BF16, "optim": {"state": "int8"}},
    "lora": {**_BF16, "lora": {"r": 2, "dropout": 0.1, "modules_to_save": ["lm_head"]}},
    "dpo": _PAIRS,
    "kto": _JUDGED,
    "signsgd": {**_BF16, "optim": {"name": "signsgd", "state": "bf16"}},
    "orpo": {"data": {"path": "dpo.jsonl"}, "train": {"loss": "orpo"}},
    "drives": {**_BF16, "parallel": {"shards": 2}, "train": {"precision": "bf16", "device": "emulated"},
               "memory": _DRIVES},
}  # fmt: skip
"""By name, settings beside those that all have."""

ALL: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "text.txt", "seq_len": 16, "cache": "cache"},
    "train": {"steps": STEPS, "micro_batch_size": 2, "grad_accumulation": 2, "device": "cpu", "seed": 7},
    "optim": {"lr": 0.01, "warmup_steps": 1, "max_grad_norm": 0.5},
    "memory": {"activations": "recompute", "fragments": False, "lockstep": 1},
    "checkpoint": {"every": SAVED, "keep_last": None},
    "eval": {"every": None},
    "log": {"progress": "none", "report": False},
    "out": "run",
}
SAME_CHECKPOINT = {"drives": "bf16"}
"""Runs whose checkpoint is that of another, to the byte: where state lives is not in it."""


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a case, as its file has them."""
    case = CASES[name]
    keys = [*ALL, *(key for key in case if key not in ALL)]
    return {key: {**ALL.get(key, {}), **case.get(key, {})} if key != "out" else ALL[key] for key in keys}


@contextmanager
def laid_out(name: str) -> Iterator[Path]:
    """Make a directory with what a case trains, its settings and its checkpoint, and work there meanwhile."""
    with tempfile.TemporaryDirectory(prefix="run-") as directory:
        root = Path(directory)
        for item in SHARED:
            source = DATA / item
            (shutil.copytree if source.is_dir() else shutil.copy)(source, root / item)
        if (DATA / name).exists():
            shutil.copy(DATA / name / "config.yaml", root)
        if (saved := DATA / SAME_CHECKPOINT.get(name, name) / CHECKPOINT).exists():
            shutil.copytree(saved, root / CHECKPOINT)
        before = Path.cwd()
        os.chdir(root)  # paths of settings are relative
        try:
            yield root
        finally:
            os.chdir(before)


def go_on(root: Path) -> dict[str, Any]:
    """Resume a case for the steps that are left; returns what was loaded, and what came out."""
    loaded: dict[str, str] = {}
    step_of = loop.train_step

    def noted(run: Any) -> Any:
        if not loaded:
            run.engine.sync()
            with tempfile.TemporaryDirectory() as directory:
                write_state(run.engine, Path(directory))
                loaded.update(by_plane(tensors_in(Path(directory))))
            loaded["master"] = digest(dict(run.engine.named_masters()))
        return step_of(run)

    with patch.object(loop, "train_step", noted):
        train(load_config("config.yaml"), resume=CHECKPOINT)
    return {"loaded": dict(sorted(loaded.items())), **came_out(root / "run")}


def came_out(run: Path) -> dict[str, Any]:
    """Return what the steps after the checkpoint have left."""
    rows = [row for row in rows_of(run) if row["step"] > SAVED]
    newest = run / "checkpoints" / f"step-{STEPS:08d}"
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "resumed": by_plane(tensors_in(newest)),
    }


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """Return every tensor of a directory."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.rglob("*.safetensors")):
        found |= load_file(file)
    return found


def by_plane(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each plane; a tensor without one is a weight."""
    planes: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        plane, slash, _ = name.partition("/")
        planes[plane if slash else "weight"][name] = tensor
    return {plane: digest(of) for plane, of in sorted(planes.items())}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().contiguous()
        found.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


def kernels() -> str:
    """Return a digest of what plain torch computes here of such a model: processors differ in the last bits.

    Where it is that of the machine that wrote the checkpoints, today's steps have to end in the same bits.
    """
    found: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (2, 4):
            model = AutoModelForCausalLM.from_pretrained(DATA / "model", dtype=dtype).train()
            torch.manual_seed(1)
            ids = torch.randint(3, 290, (rows, 16))
            ids[0, 12:] = 0
            out = model(ids, attention_mask=(ids != 0).long(), labels=ids.where(ids != 0, -100))
            hidden = model.get_input_embeddings().weight
            low = [torch.randn(2, 8, dtype=dtype), torch.randn(8, 2, dtype=dtype)]
            beside = linear(linear(dropout(hidden, 0.1), low[0]), low[1])
            (out.loss - logsigmoid(beside.float()).mean()).backward()
            label = f"{dtype} {rows}"
            found[f"{label} loss"] = out.loss
            found |= {f"{label} {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return digest(found)
