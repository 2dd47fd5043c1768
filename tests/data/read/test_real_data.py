"""Real data sets as their authors publish them: every row read, and counted by other means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.sections.data import DataConfig
from megatrain.data.example import ChatExample, KtoExample, PreferenceExample, TextExample
from megatrain.data.read.examples import read_examples
from megatrain.errors import DataError

DATA = Path(__file__).parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the data sets in {DATA}")

FILES = {
    "llamafactory/alpaca_en_demo.json": ("alpaca", ChatExample),
    "llamafactory/alpaca_zh_demo.json": ("alpaca", ChatExample),
    "llamafactory/identity.json": ("alpaca", ChatExample),
    "llamafactory/glaive_toolcall_en_demo.json": ("sharegpt (messages in conversations)", ChatExample),
    "llamafactory/reason_tool_use_demo_50.jsonl": ("messages", ChatExample),
    "llamafactory/v1_sft_demo.jsonl": ("messages", ChatExample),
    "llamafactory/dpo_en_demo.json": ("preference (messages in conversations)", PreferenceExample),
    "llamafactory/kto_en_demo.json": ("kto", KtoExample),
    "llamafactory/c4_demo.jsonl": ("text", TextExample),
    "stanford_alpaca/seed_tasks.jsonl": ("alpaca", ChatExample),
    "gsm8k/test.jsonl": ("alpaca (instruction in question, output in answer)", ChatExample),
}


def rows_of(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


def read(path: Path, **settings: Any) -> tuple[list[Any], list[str]]:
    stream = read_examples(DataConfig(path=(str(path),), **settings))
    return list(stream), [source.format for source in stream.report.sources]


def characters(example: Any) -> int:
    """Count what an example says, in characters."""
    if isinstance(example, TextExample):
        return len(example.text)
    if isinstance(example, ChatExample):
        parts = [example.messages]
    elif isinstance(example, PreferenceExample):
        parts = [example.prompt, example.chosen, example.rejected]  # type: ignore[list-item]
    else:
        parts = [example.prompt, example.completion]
    return sum(len(message.content) + len(message.reasoning or "") for part in parts for message in part)


def spoken(value: Any, key: str = "") -> int:
    """Count the characters of a row that somebody says, knowing nothing but the names of its keys."""
    if isinstance(value, list):
        return sum(spoken(inner, key) for inner in value)
    if isinstance(value, dict):
        if value.get("type") == "tool_call" or value.get("from") == "function_call":
            return 0
        return sum(spoken(inner, name) for name, inner in value.items())
    says = key in ("instruction", "input", "output", "value", "content", "text", "question", "answer")
    return len(value) if says and isinstance(value, str) else 0


@pytest.mark.parametrize("name", FILES)
def test_every_row_is_read(name: str) -> None:
    kind, form = FILES[name]
    rows = rows_of(DATA / name)
    examples, formats = read(DATA / name)
    assert formats == [kind]
    assert [type(example) for example in examples] == [form] * len(rows)
    joins = sum(bool(row.get("instruction") and (row.get("input") or instance_input(row))) for row in rows)
    assert sum(map(characters, examples)) == sum(spoken(row) for row in rows) + joins


def instance_input(row: Any) -> str:
    return str(row.get("instances", [{}])[0].get("input", ""))


def test_text_is_read_to_its_last_byte() -> None:
    path = DATA / "text" / "tinyshakespeare.txt"
    (example,), _ = read(path)
    assert example.text.encode() == path.read_bytes()


def test_judgements_are_those_of_the_file() -> None:
    rows = rows_of(DATA / "llamafactory" / "kto_en_demo.json")
    examples, _ = read(DATA / "llamafactory" / "kto_en_demo.json")
    assert [example.is_good for example in examples] == [row["label"] for row in rows]
    assert [len(example.prompt) for example in examples] == [len(row["messages"]) - 1 for row in rows]
    rows = rows_of(DATA / "llamafactory" / "dpo_en_demo.json")
    examples, _ = read(DATA / "llamafactory" / "dpo_en_demo.json")
    for row, example in zip(rows, examples, strict=True):
        assert [message.content for message in (*example.chosen, *example.rejected)] == [
            row["chosen"]["value"],
            row["rejected"]["value"],
        ]
        assert len(example.prompt) == len(row["conversations"])


def test_tools_and_calls_are_those_of_the_file() -> None:
    rows = rows_of(DATA / "llamafactory" / "glaive_toolcall_en_demo.json")
    examples, _ = read(DATA / "llamafactory" / "glaive_toolcall_en_demo.json")
    assert sum(len(example.tools) for example in examples) == sum(
        len(json.loads(row["tools"])) for row in rows
    )
    calls = [
        message.tool_calls[0]["function"]
        for example in examples
        for message in example.messages
        if message.tool_calls
    ]
    assert calls == [
        json.loads(turn["value"])
        for row in rows
        for turn in row["conversations"]
        if turn["from"] == "function_call"
    ]
    examples, _ = read(DATA / "llamafactory" / "reason_tool_use_demo_50.jsonl")
    messages = [message for example in examples for message in example.messages]
    assert sum(len(message.tool_calls) for message in messages) == 41 + 2 * 9 + 3 * 3
    assert sum(message.reasoning is not None for message in messages) == 112


def test_weights_of_turns_are_kept() -> None:
    examples, _ = read(DATA / "llamafactory" / "v1_sft_demo.jsonl")
    weights = {(message.role, message.loss_weight) for example in examples for message in example.messages}
    assert weights == {("user", 0.0), ("assistant", 1.0)}


def test_dataset_info_is_read_as_it_is() -> None:
    names = ("identity", "alpaca_en_demo", "glaive_toolcall_en_demo", "dpo_en_demo", "kto_en_demo", "c4_demo")
    stream = read_examples(DataConfig(path=(str(DATA / "llamafactory"),), dataset=(*names, "wiki_demo")))
    examples = list(stream)
    assert len(examples) == 91 + 999 + 300 + 300 + 300 + 300 + 30
    assert [(source.name, source.num_kept) for source in stream.report.sources] == [
        ("identity", 91),
        ("alpaca_en_demo", 999),
        ("glaive_toolcall_en_demo", 300),
        ("dpo_en_demo", 300),
        ("kto_en_demo", 300),
        ("c4_demo", 300),
        ("wiki_demo", 30),  # LLaMA-Factory reads .txt files line by line
    ]
    alone, _ = read(DATA / "llamafactory" / "dpo_en_demo.json")
    assert [example for example in examples if isinstance(example, PreferenceExample)] == alone


def test_images_are_refused_by_name() -> None:
    info = DATA / "llamafactory" / "dataset_info.json"
    with pytest.raises(
        DataError, match=r"mllm_demo.json, row 1: it has images, video or sound, which are not read"
    ):
        read(info, dataset=("mllm_demo",))
    with pytest.raises(DataError, match=r"mllm_audio_demo.json does not exist"):
        read(info, dataset=("mllm_audio_demo",))
