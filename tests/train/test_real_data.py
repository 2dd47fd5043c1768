"""Real data sets, prepared and trained on by the commands: tokens of each step as counted by other means."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.cli import main

DATA = Path(__file__).parents[3] / "shared/data"
MODEL = DATA / "stories260K/hf"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the data sets in {DATA}")

PLAIN = (
    "{{ bos_token }}{% for m in messages %}### {{ m.role | capitalize }}:\n"
    "{% if m.role == 'assistant' %}[[{{ m.content }}{{ eos_token }}]]{% else %}{{ m.content }}\n{% endif %}"
    "{% endfor %}"
)
"""What `data.chat_template=plain` writes, as the documentation describes it."""
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}({{ m.role }}) "
    "{% if m.role == 'assistant' %}[[{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ eos_token }}]]{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
"""Writes all that the rows with tools have. Between double brackets is what a model should learn."""

CHATS = {
    "llamafactory/alpaca_en_demo.json": PLAIN,
    "llamafactory/alpaca_zh_demo.json": PLAIN,
    "llamafactory/identity.json": PLAIN,
    "llamafactory/v1_sft_demo.jsonl": PLAIN,
    "llamafactory/glaive_toolcall_en_demo.json": TOOLS,
    "llamafactory/reason_tool_use_demo_50.jsonl": TOOLS,
    "stanford_alpaca/seed_tasks.jsonl": PLAIN,
    "gsm8k/train.jsonl": PLAIN,
    "gsm8k/test.jsonl": PLAIN,
}
TEXTS = ("llamafactory/c4_demo.jsonl", "llamafactory/wiki_demo.txt", "text/tinyshakespeare.txt")
SEQ_LEN = 512
LONG = 3072
"""For rows with tools: their descriptions alone are longer than the model's own context."""


def seq_len_of(name: str) -> int:
    return LONG if CHATS.get(name) is TOOLS else SEQ_LEN


def turns_of(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Read a row by hand, as its authors describe it."""
    if "instruction" in row or "question" in row:
        given = row.get("instances", [row])[0]
        asked = [row.get("instruction") or row["question"], given.get("input")]
        yield {"role": "user", "content": "\n".join(filter(None, asked))}
        yield {"role": "assistant", "content": given.get("output") or row["answer"]}
        return
    for turn in row.get("messages") or row["conversations"]:
        parts = turn.get("content") or [{"type": turn["from"], "value": turn["value"]}]
        role = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
        spoken = turn.get("role") or turn["from"]
        said: dict[str, Any] = {"role": role.get(spoken, spoken), "content": ""}
        for part in parts:
            if part["type"] == "reasoning":
                said["reasoning_content"] = part["value"]
            elif part["type"] in ("tool_call", "function_call"):
                said.setdefault("tool_calls", []).append({"function": json.loads(part["value"])})
            else:
                said["content"] += part["value"]
        yield said


def rows_of(name: str) -> list[dict[str, Any]]:
    text = (DATA / name).read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


class Counted(NamedTuple):
    """An example as transformers tokenises it, with the mask of its `{% generation %}`."""

    ids: list[int]
    is_trained: list[bool]

    @property
    def numbers(self) -> tuple[int, int]:
        """Tokens, and those that the loss averages over."""
        return len(self.ids), sum(self.is_trained[1:])


def count(name: str, tokenizer: Any, num_rows: int | None = None) -> Iterator[Counted]:
    """Yield the examples that have something to learn within a sequence, of all rows or the first."""
    template = CHATS[name].replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
    for row in rows_of(name)[:num_rows]:
        tools = [tool.get("function", tool) for tool in json.loads(row.get("tools") or "[]")]
        encoded = tokenizer.apply_chat_template(
            list(turns_of(row)),
            tools=[{"type": "function", "function": tool} for tool in tools] or None,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = [bool(flag) for flag in encoded["assistant_masks"][: seq_len_of(name)]]
        if any(mask[1:]):
            yield Counted(encoded["input_ids"][: len(mask)], mask)


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command as a user does, and return the path of its run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))

    def run(command: str, name: str, out: str = "run", **more: Any) -> Path:
        template = CHATS.get(name, PLAIN)
        (tmp_path / "chat.jinja").write_text(template.replace("[[", "").replace("]]", ""), encoding="utf-8")
        keys = {
            "model.path": model,
            "data.path": DATA / name,
            "data.seq_len": seq_len_of(name),
            "data.chat_template": "plain" if template is PLAIN else tmp_path / "chat.jinja",
            "out": tmp_path / out,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        settings = [f"{key}={value}" for key, value in keys.items()]
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), *settings])
        assert not ended.value.code
        return tmp_path / out

    return run


def train(call: Any, name: str, **more: Any) -> tuple[list[tuple[int, int]], list[float]]:
    """Train; return tokens and targets of each step, and the losses."""
    settings = {"train__grad_accumulation": 1, "train__micro_batch_size": 1, "train__device": "cpu"}
    settings |= {"optim__warmup_steps": 0, "checkpoint__every": "null", "log__progress": "none"}
    out = call("train", name, data__shuffle="false", **(settings | more))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    sums = [(0, 0), *((row["tokens"], row["targets"]) for row in rows)]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(sums)]
    return steps, [row["loss"] for row in rows]


def loss_of(example: Counted) -> float:
    """Compute the loss of an example with the model as it is, resident."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    ids = torch.tensor([example.ids])
    labels = ids.masked_fill(~torch.tensor([example.is_trained]), -100)
    with torch.no_grad():
        return float(model(input_ids=ids, labels=labels).loss)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "identity" in name else pytest.mark.parity) for name in CHATS],
)
def test_each_step_has_the_tokens_of_its_example(name: str, call: Any, tokenizer: Any) -> None:
    """One example in a sequence and a step, padded: what pads is no token that was read."""
    expected = list(islice(count(name, tokenizer), 3))
    steps, losses = train(call, name, out="padded", data__packing="pad", train__steps=3)
    assert steps == [example.numbers for example in expected]
    assert losses[0] == pytest.approx(loss_of(expected[0]), rel=1e-5)
    assert all(map(math.isfinite, losses))


@pytest.mark.parity
@pytest.mark.parametrize("name", CHATS)
def test_an_epoch_has_the_tokens_of_its_examples(name: str, call: Any, tokenizer: Any) -> None:
    """As it is by default: several examples in a sequence."""
    num_rows = SEQ_LEN * 12 // seq_len_of(name)
    expected = [example.numbers for example in count(name, tokenizer, num_rows)]
    steps, losses = train(call, name, train__epochs=1, data__max_samples=num_rows)
    assert len(steps) <= len(expected)
    assert tuple(map(sum, zip(*steps, strict=True))) == tuple(map(sum, zip(*expected, strict=True)))
    assert all(map(math.isfinite, losses))


@pytest.mark.parity
@pytest.mark.parametrize("name", CHATS)
def test_a_whole_file_is_prepared(
    name: str, call: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [example.numbers for example in count(name, tokenizer)]
    tokens, trained = map(sum, zip(*expected, strict=True))
    call("data prepare", name)
    said = capsys.readouterr().out
    assert f"{len(expected):,} of {len(rows_of(name)):,} examples, {tokens:,} tokens, {trained:,} tr" in said


@pytest.mark.parity
@pytest.mark.parametrize("name", TEXTS)
def test_text_is_trained_on_to_its_last_whole_sequence(
    name: str, call: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    is_document = name.endswith(".txt")
    texts = [(DATA / name).read_text(encoding="utf-8")] if is_document else []
    texts = texts or [row["text"] for row in rows_of(name)]
    ids = [number for text in texts for number in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    call("data prepare", name)
    said = capsys.readouterr().out
    sequences = len(ids) // SEQ_LEN
    assert f"{len(ids):,} tokens, {sequences:,} sequences of {SEQ_LEN} ({len(ids) % SEQ_LEN:,} token" in said
    steps, losses = train(call, name, train__steps=3)
    assert steps == [(SEQ_LEN, SEQ_LEN - 1)] * 3
    first = Counted(ids[:SEQ_LEN], [True] * SEQ_LEN)
    assert losses[0] == pytest.approx(loss_of(first), rel=1e-5)
    assert all(map(math.isfinite, losses))
