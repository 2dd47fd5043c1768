"""`megatrain verify` of a stranger's model says that it is sound or damaged, whatever its files are."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from random import Random

from megatrain.train.commands.verify import verify_path
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_json
from tests.fuzz.test_headers import damaged

INDEX = {"metadata": {}, "weight_map": {"a.scales": "model.safetensors", "empty": "model.safetensors"}}


def read(root: Path, random: Random) -> None:
    model = root / "model"
    model.mkdir()
    try:
        (model / "model.safetensors").write_bytes(damaged(random))
        if random.random() < 0.3:
            (model / "config.json").write_bytes(mutated_json(random, {"model_type": "llama"}))
        if random.random() < 0.3:
            (model / "model.safetensors.index.json").write_bytes(mutated_json(random, INDEX))
        if random.random() < 0.2:
            (model / "adapter_config.json").write_bytes(mutated_json(random, {"r": 8, "peft_type": "LORA"}))
            (model / "adapter_model.safetensors").write_bytes(damaged(random))
        for verified in verify_path(model):
            assert verified.text
    finally:
        shutil.rmtree(model)


@counts(sample=400, soak=30_000)
def test_any_model_is_said_to_be_sound_or_damaged(tmp_path: Path, num: int) -> None:
    attack(num, partial(read, tmp_path), tmp_path)
