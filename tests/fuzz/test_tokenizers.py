"""Files of tokenizers of any JSON are loaded and used, or refused before the first step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatrain.data.tokenizer import load_tokenizer, train_tokenizer
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_json


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """The values of each file of a small tokenizer."""
    tokenizer = train_tokenizer(["the cat sat on the mat."] * 5, 270)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    names = ("tokenizer.json", "tokenizer_config.json")
    return {name: json.loads((tmp_path / name).read_text()) for name in names}


def read(folder: Path, files: dict[str, Any], random: Random) -> None:
    name = random.choice(list(files))
    for each, values in files.items():
        (folder / each).write_bytes(
            mutated_json(random, values) if each == name else json.dumps(values).encode()
        )
    tokenizer = load_tokenizer(str(folder))
    tokenizer.decode(tokenizer("Once upon a time, the cat sat.")["input_ids"])


@pytest.mark.filterwarnings("ignore")  # transformers warns of odd values
@counts(sample=150, soak=10_000)
def test_any_tokenizer_is_loaded_or_refused(tmp_path: Path, files: dict[str, Any], num: int) -> None:
    assert attack(num, partial(read, tmp_path, files), tmp_path) > num // 4
