"""A run of a model for images and text: rows of text, towers that stay, and the processor's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from tests.hf.setups import tokenizer
from tests.model.resident import random_model
from tests.model.weights.test_parts import IMAGES_AND_TEXT
from tests.train.project import make_config, write_corpus


def test_a_run_trains_text_and_keeps_towers_and_the_processor(tmp_path: Path) -> None:
    """In its checkpoint, after a resume, and in the model that it leaves."""
    place = tmp_path / "model"
    random_model(IMAGES_AND_TEXT["mistral3"]()).save_pretrained(place)
    tokenizer().save_pretrained(place)
    (place / "preprocessor_config.json").write_text('{"image_processor_type": "PixtralImageProcessor"}')
    write_corpus(tmp_path / "corpus.txt")
    settings: dict[str, Any] = {
        "model": {"path": str(place), "init": "pretrained"},
        "data": {"seq_len": 16},
        "optim": {"warmup_steps": 0},
        "checkpoint": {"every": 1, "keep_last": None},
    }
    whole = train(make_config(tmp_path, "whole", train={"steps": 2}, **settings))
    part = whole / "checkpoints/step-00000001"
    again = train(make_config(tmp_path, "again", train={"steps": 2}, **settings), resume=str(part))
    before, after = (load_file(path / "model.safetensors") for path in (place, whole / "hf"))
    assert after.keys() == before.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed
    assert all("language_model" in key for key in changed)
    assert [
        key for key, value in load_file(again / "hf/model.safetensors").items() if not value.equal(after[key])
    ] == []
    for directory in (part, whole / "hf", again / "hf"):
        assert (directory / "preprocessor_config.json").read_bytes() == (
            place / "preprocessor_config.json"
        ).read_bytes()
    assert json.loads((whole / "hf/config.json").read_text())["architectures"] == [
        "Mistral3ForConditionalGeneration"
    ]
    AutoModelForImageTextToText.from_pretrained(whole / "hf")
    adapters = train(make_config(tmp_path, "lora", train={"steps": 1}, lora={"r": 2}, **settings))
    export_run(adapters, tmp_path / "merged", merges=True)
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == before.keys()
    assert (tmp_path / "merged/preprocessor_config.json").exists()
