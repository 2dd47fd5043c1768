"""Rows of any JSON, text or CSV are read, left out and counted, or refused, in every format of rows."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from megatrain.config.sections.data import DataConfig
from megatrain.data.read.examples import read_examples
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_bytes, mutated_json, odd_value

CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
ROWS: tuple[dict[str, Any], ...] = (
    {"text": "Once upon a time there was a row."},
    {"messages": [{"role": "system", "content": "Be short."}, *CHAT]},
    {
        "messages": CHAT,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi!"}], "system": "x"},
    {"instruction": "Add.", "input": "1 1", "output": "2", "history": [["a", "b"]]},
    {"prompt": "Add 1 and 1", "completion": "2"},
    {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "No."}]},
    {"prompt": "q", "completion": "a", "label": True},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
    {
        "messages": [
            *CHAT,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
        ]
    },
)
FORMATS = (
    "auto",
    "text",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "preference",
    "kto",
    "tokens",
)


def content(random: Random) -> tuple[str, bytes]:
    """Return the name and the bytes of a file of rows."""
    rows = random.sample(ROWS, random.choice((1, 1, 2)))
    if random.random() < 0.2:
        rows = [{**rows[0], random.choice(("text", "messages", "label", "images", "")): odd_value(random)}]
    kind = random.randrange(10)
    if kind == 0:
        return "rows.json", mutated_json(random, rows)
    if kind == 1:
        return "rows.txt", mutated_bytes(random, b"A document.\n\nAnother \xe2\x82\xac one.\n")
    if kind == 2:
        data = mutated_bytes(random, b'text,"a ""b""",c\n"x\ny",1,2\n3,4\n')
        return random.choice(("rows.csv", "rows.tsv")), data
    lines = [mutated_json(random, row) for row in rows]
    data = random.choice((b"\n", b"\n", b"\r\n", b"\n\n", b"")).join(lines)
    if kind == 3:
        return "rows.jsonl.gz", mutated_bytes(random, gzip.compress(data, 1))
    return "rows.jsonl", data + random.choice((b"\n", b""))


def read(folder: Path, random: Random) -> None:
    name, data = content(random)
    file = folder / name
    file.write_bytes(data)
    try:
        settings = DataConfig(
            path=str(file),  # type: ignore[arg-type]
            seq_len=64,
            format=random.choice(FORMATS) if random.random() < 0.3 else "auto",
            on_bad_row=random.choice(("drop", "stop")),
        )
        for example in read_examples(settings):
            assert example is not None
    finally:
        file.unlink()


@counts(sample=2000, soak=250_000)
def test_any_rows_are_read_or_refused(tmp_path: Path, num: int) -> None:
    (tmp_path / "outside.txt").write_text("not a row")
    assert attack(num, partial(read, tmp_path), tmp_path) > num // 4


def test_every_row_is_one_of_a_format(tmp_path: Path) -> None:
    for row in ROWS:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        assert len(list(read_examples(DataConfig(path=str(tmp_path / "rows.jsonl"), seq_len=64)))) >= 1  # type: ignore[arg-type]
