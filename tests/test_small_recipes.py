"""Recipes of models with experts run in small: the model's class, its checkpoint's format, every setting."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from megatrain.config import build_config, read_config
from megatrain.recipes import recipes
from megatrain.train.loop import train
from megatrain.train.planning.plan_report import report
from tests.hf.setups import tokenizer
from tests.model.weights.quantised.test_checkpoints import DEEPSEEK, GPT_OSS, SMALL, write
from tests.test_recipes import RECIPES, plan
from tests.train.test_loop import rows_of

QWEN = Qwen3MoeConfig(
    **SMALL,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    architectures=["Qwen3MoeForCausalLM"],
)

ROW = 128
"""Tokens of a row: what waits of it between forward and backward is enough to leave the device."""

STREAMED = {"fragments": False, "resident_blocks": 0, "mirror_resident": True, "activations": "recompute"}


@dataclass(frozen=True, kw_only=True)
class Small:
    """A recipe's model in small, and what the recipe's plan leaves to choose."""

    kind: str
    """The format of its checkpoint; empty: bf16."""
    rows: int
    """The rows of a step, which is one round."""
    memory: Mapping[str, Any]
    """The settings that the plan chooses; of places of gradients, one of those."""
    ram: Mapping[str, str] | None = None
    """What forces on the drives what is there in the plan, by device."""


RECIPE = {
    "30b-a3b-24gb": Small(
        kind="",
        rows=2,
        memory={**STREAMED, "num_slots": 3, "num_gradient_buffers": 2, "boundaries": "host"}
        | {"lockstep": 2, "gradients": "host", "sums": "device", "expert_chunks": 2},
    ),
    "120b-h200": Small(
        kind="mxfp4",
        rows=8,
        memory={**STREAMED, "num_slots": 3, "num_gradient_buffers": 2, "boundaries": "device"}
        | {"lockstep": 8, "gradients": "device", "sums": "device", "expert_chunks": 6},
    ),
    "671b-h200-drives": Small(
        kind="fp8 ragged",
        rows=8,
        memory={**STREAMED, "num_slots": 1, "num_gradient_buffers": 1, "boundaries": "nvme"}
        | {"lockstep": 8, "gradients": "nvme", "sums": "device", "expert_chunks": 1},
        ram={"cpu": "3840KiB", "auto": "1900KiB"},
    ),
}


def write_model(place: Path, kind: str) -> Path:
    """Write a tiny checkpoint with a tokenizer; in FP8, with a layer that the model does not have."""
    config = copy.deepcopy({"": QWEN, "mxfp4": GPT_OSS, "fp8 ragged": DEEPSEEK}[kind])
    config.max_position_embeddings = ROW
    if kind == "mxfp4":
        config.num_local_experts = 12  # two of each chunk
    if not kind:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
    elif kind == "mxfp4":
        write(kind, place, config)
    else:
        config.num_hidden_layers = 4
        tensors = load_file(write(kind, place, config) / "model.safetensors")
        further = {
            name.replace("layers.3.", "layers.4."): value.clone()
            for name, value in tensors.items()
            if "layers.3." in name
        }
        save_file(tensors | further, place / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save_pretrained(place)
    return place


def write_pairs(file: Path) -> Path:
    """Write prompts and completions in the words of the tokenizer."""
    rows = [
        {"prompt": " ".join(str((3 * n + i) % 100) for i in range(6)), "completion": f"{n % 90} {n % 7} 5"}
        for n in range(1000)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(name: str, root: Path, out: str, memory: Mapping[str, Any], *, device: str, updates: str) -> Path:
    """Train a recipe's tiny model: its settings, but for places, sizes and the device."""
    small, raw = RECIPE[name], read_config(recipes()[name])
    raw["model"]["path"], raw["data"] = (
        str(root / "model"),
        {"path": str(root / "pairs.jsonl"), "seq_len": ROW},
    )
    raw["train"] |= {"steps": 3, "micro_batch_size": 1, "tokens_per_step": small.rows * ROW}
    raw["train"] |= {"device": device, "precision": "bf16"}
    raw["optim"] |= {"warmup_steps": 0, "lr": 1e-2, "updates": updates}
    raw["memory"] = {**raw.get("memory", {}), **memory, "on_mismatch": "stop"}
    raw["log"] = {"progress": "none"}
    return train(build_config({**raw, "out": str(root / out)}))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.parity if small.ram is None else ())
        for name, small in RECIPE.items()
    ],
)
def test_a_recipe_runs_in_small_with_all_of_its_settings_to_the_bits_of_a_resident_run(
    name: str, tmp_path: Path
) -> None:
    check_small_run(name, tmp_path, device="cpu")


def check_small_run(name: str, root: Path, *, device: str) -> None:
    """Hold a recipe's run in small against one whose layers stay on the device."""
    small = RECIPE[name]
    write_model(root / "model", small.kind)
    write_pairs(root / "pairs.jsonl")
    drives = {}
    if small.ram is not None:
        drives = {"tiers": {"ram": small.ram[device], "nvme": [str(root / f"drive{n}") for n in range(4)]}}
    streamed = run(name, root, "streamed", {**small.memory, **drives}, device=device, updates="deferred")
    resident = {
        "tiers": "auto",
        "resident_blocks": 4 if small.ram else 2,
        "activations": "keep",
        "lockstep": 1,
    }
    other = run(name, root, "resident", resident, device=device, updates="serial")
    losses = [row["loss"] for row in rows_of(streamed)]
    assert losses == [row["loss"] for row in rows_of(other)]
    assert losses[-1] < losses[0]
    check_exports(root / "model", streamed, other)
    made = json.loads((streamed / "plan.json").read_text())
    wanted, found = dict(small.memory), made["policy"]["memory"]
    assert found.pop("gradients") in ("auto", wanted.pop("gradients"))
    assert found == wanted
    assert (made["bytes_per_step"]["saved"] > 0) == (small.memory["boundaries"] != "device")
    on_drives = {pool["name"] for pool in made["pools"] if pool["tier"] == "nvme"}
    assert ("two copies of the state" in on_drives) == ("waiting gradients" in on_drives) == bool(small.ram)


def check_exports(model: Path, streamed: Path, other: Path) -> None:
    """Hold exports against each other; what the model has no place for is in them too."""
    before, found, expected = (
        load_file(path / "model.safetensors") for path in (model, streamed / "hf", other / "hf")
    )
    assert found.keys() == expected.keys()
    assert [key for key, value in found.items() if not torch.equal(value, expected[key])] == []
    assert {key for key in before if "layers.4." in key and not key.endswith("scale_inv")} <= found.keys()


@pytest.mark.parity
@pytest.mark.parametrize("name", RECIPE)
def test_what_a_small_run_is_given_is_what_the_plan_of_its_recipe_chooses(name: str) -> None:
    small, planned = RECIPE[name], plan(name, **RECIPES[name])
    choice = planned.plan.choice
    asked = dict(small.memory)
    assert asked.pop("gradients") in choice.gradients
    assert {asked.pop("activations")} == set(choice.activations)
    assert asked.pop("resident_blocks") == choice.resident_layers
    assert asked == {key: getattr(choice, key) for key in asked}
    assert choice.updates == "deferred"
    assert bool(choice.tiers) == (small.ram is not None)
    batch = json.loads(report(planned, as_json=True))["batch"]
    assert batch["num_micro_batches"] == choice.lockstep == small.rows
