"""Bad data by the dozen: every row kept, repaired or dropped by the policy of docs/data.md, and counted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.sections.data import DataConfig
from megatrain.data.read import text_rows
from megatrain.data.read.examples import read_examples
from megatrain.errors import DataError

MEDIA = "it has images, video or sound, which are not read"
GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}


def turns(*said: Any) -> dict[str, Any]:
    """Return a row of turns: (role, content) each, or a turn as it is."""
    return {
        "messages": [
            turn if not isinstance(turn, tuple) else {"role": turn[0], "content": turn[1]} for turn in said
        ]
    }


def lines(*rows: Any) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


def deep(levels: int) -> bytes:
    return b'{"text": ' + b"[" * levels + b"]" * levels + b"}\n"


ASSISTANT = ("assistant", "a")
TEXTS = {"text": "x"}
ALPACA = {"instruction": "i", "input": "", "output": "o"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
TOKENS = {"input_ids": [1, 2]}

# What a file holds, how many examples are kept, and the rows dropped and repaired by reason.
CASES: dict[str, tuple[str, bytes, int, dict[str, list[int]], dict[str, list[int]]]] = {
    "half a line at the end": ("a.jsonl", lines(TEXTS, b'{"text": "y'), 1, {"it is not valid JSON": [2]}, {}),
    "two objects in a line": ("a.jsonl", lines(TEXTS, b"{} {}\n"), 1, {"it is not valid JSON": [2]}, {}),
    "a comma too many": ("a.jsonl", lines(TEXTS, b'{"text": "y",}\n'), 1, {"it is not valid JSON": [2]}, {}),
    "single quotes": ("a.jsonl", lines(TEXTS, b"{'text': 'y'}\n"), 1, {"it is not valid JSON": [2]}, {}),
    "a line break inside a string": (
        "a.jsonl",
        lines(TEXTS, b'{"text": "y\nz"}\n', TEXTS),
        2,
        {"it is not valid JSON": [2, 3]},
        {},
    ),
    "brackets too deep": ("a.jsonl", lines(TEXTS, deep(100_000)), 1, {"it is not readable as JSON": [2]}, {}),
    "a number too long": (
        "a.jsonl",
        lines(TEXTS, b'{"text": ' + b"1" * 5000 + b"}\n"),
        1,
        {"it is not readable as JSON": [2]},
        {},
    ),
    "a row that is a list": ("a.jsonl", lines(TEXTS, [1]), 1, {"it is not an object": [2]}, {}),
    "a row that is null": ("a.jsonl", lines(TEXTS, None), 1, {"it is not an object": [2]}, {}),
    "an element that is a string": ("a.json", b'[{"text": "x"}, "y"]', 1, {"it is not an object": [2]}, {}),
    "blank lines are no rows": ("a.jsonl", lines(TEXTS, b"\n \r\n", TEXTS), 2, {}, {}),
    "byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + lines(TEXTS), 1, {}, {}),
    "byte order mark before an array": ("a.json", b'\xef\xbb\xbf[{"text": "x"}]', 1, {}, {}),
    "line ends of Windows": ("a.jsonl", b'{"text": "x"}\r\n{"text": "y"}\r\n', 2, {}, {}),
    "invalid UTF-8": ("a.jsonl", lines(TEXTS, b'{"text": "\xe9"}\n'), 1, {"it is not valid UTF-8": [2]}, {}),
    "half a surrogate pair": (
        "a.jsonl",
        lines(TEXTS, b'{"text": "\\ud800"}\n'),
        1,
        {'column "text" holds half a surrogate pair': [2]},
        {},
    ),
    "NaN for text": ("a.jsonl", lines(TEXTS, b'{"text": NaN}\n'), 1, {'column "text" is not text': [2]}, {}),
    "NaN in another column": ("a.jsonl", b'{"text": "x", "score": NaN}\n', 1, {}, {}),
    "a number for text": ("a.jsonl", lines(TEXTS, {"text": 5}), 1, {'column "text" is not text': [2]}, {}),
    "an object for text": ("a.jsonl", lines(TEXTS, {"text": {}}), 1, {'column "text" is not text': [2]}, {}),
    "null for text": ("a.jsonl", lines(TEXTS, {"text": None}), 1, {'column "text" holds null': [2]}, {}),
    "a missing column": ("a.jsonl", lines(TEXTS, {"body": "y"}), 1, {'there is no column "text"': [2]}, {}),
    "an empty document": ("a.jsonl", lines(TEXTS, {"text": " \n"}), 1, {"the text is empty": [2]}, {}),
    "a column given twice": ("a.jsonl", b'{"text": "x", "text": "y"}\n', 1, {}, {}),
    "mixed formats": (
        "a.jsonl",
        lines(GOOD, GOOD, ALPACA),
        2,
        {'there is no column "messages"': [3]},
        {},
    ),
    "another spelling among turns": (
        "a.jsonl",
        lines(GOOD, {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
        2,
        {},
        {},
    ),
    "a role that is not known": (
        "a.jsonl",
        lines(GOOD, turns(("narrator", "n"), ASSISTANT)),
        1,
        {"a role is not known": [2]},
        {},
    ),
    "a role that is a number": (
        "a.jsonl",
        lines(GOOD, turns((1, "n"), ASSISTANT)),
        1,
        {"a role is not known": [2]},
        {},
    ),
    "a turn without a role": (
        "a.jsonl",
        lines(GOOD, turns({"content": "c"}, ASSISTANT)),
        1,
        {"a role is not known": [2]},
        {},
    ),
    "no turn of the assistant": (
        "a.jsonl",
        lines(GOOD, turns(("user", "q"))),
        1,
        {"the assistant has no turn": [2]},
        {},
    ),
    "an assistant that says nothing": (
        "a.jsonl",
        lines(GOOD, turns(("user", "q"), ("assistant", " "))),
        1,
        {"the assistant says nothing": [2]},
        {},
    ),
    "an assistant that begins": (
        "a.jsonl",
        lines(GOOD, turns(ASSISTANT, ("user", "q"), ASSISTANT)),
        2,
        {},
        {},
    ),
    "two turns of the user in a row": (
        "a.jsonl",
        lines(GOOD, turns(("user", "q"), ("user", "q"), ASSISTANT)),
        2,
        {},
        {},
    ),
    "a question at the end": (
        "a.jsonl",
        lines(GOOD, turns(("user", "q"), ASSISTANT, ("user", "q"))),
        2,
        {},
        {},
    ),
    "no turns": ("a.jsonl", lines(GOOD, {"messages": []}), 1, {'column "messages" has no turn': [2]}, {}),
    "turns that are text": (
        "a.jsonl",
        lines(GOOD, {"messages": "q"}),
        1,
        {'column "messages" is not a list': [2]},
        {},
    ),
    "turns as JSON text": (
        "a.jsonl",
        lines(GOOD, {"messages": json.dumps(GOOD["messages"])}),
        2,
        {},
        {"a list was taken from JSON text": [2]},
    ),
    "turns as broken JSON text": (
        "a.jsonl",
        lines(GOOD, {"messages": "[{"}),
        1,
        {'column "messages" is not valid JSON': [2]},
        {},
    ),
    "turns inside turns": (
        "a.jsonl",
        lines(GOOD, {"messages": [GOOD["messages"]]}),
        1,
        {"a turn is not an object": [2]},
        {},
    ),
    "a turn without content": (
        "a.jsonl",
        lines(GOOD, turns(("user", None), ASSISTANT)),
        1,
        {"a turn has no content": [2]},
        {},
    ),
    "content that is an object": (
        "a.jsonl",
        lines(GOOD, turns(("user", {"q": 1}), ASSISTANT)),
        1,
        {"turn 1 is not text": [2]},
        {},
    ),
    "content that is a number": (
        "a.jsonl",
        lines(GOOD, turns(("user", "6 * 7?"), ("assistant", 42))),
        2,
        {},
        {"a number was taken as text": [2]},
    ),
    "content that is a number beyond all floats": (
        "a.jsonl",
        lines(GOOD, turns(("user", "6 * 7?"), ("assistant", 10**400))),
        1,
        {"turn 2 is not text": [2]},
        {},
    ),
    "an image among the parts": (
        "a.jsonl",
        lines(GOOD, turns(("user", [{"type": "image_url", "image_url": {"url": "u"}}]), ASSISTANT)),
        1,
        {MEDIA: [2]},
        {},
    ),
    "a column of images": ("a.jsonl", lines(GOOD, {**GOOD, "images": ["a.jpg"]}), 1, {MEDIA: [2]}, {}),
    "an empty column of images": ("a.jsonl", lines(GOOD, {**GOOD, "images": []}), 2, {}, {}),
    "a part without a type": (
        "a.jsonl",
        lines(GOOD, turns(("user", [{"text": "q"}]), ASSISTANT)),
        1,
        {"a part has no type": [2]},
        {},
    ),
    "a part of another type": (
        "a.jsonl",
        lines(GOOD, turns(("user", [{"type": "hologram", "value": "q"}]), ASSISTANT)),
        1,
        {"a part has a type that is not known": [2]},
        {},
    ),
    "a call without content": ("a.jsonl", lines(GOOD, turns(("user", "q"), CALL)), 2, {}, {}),
    "a call without a name": (
        "a.jsonl",
        lines(GOOD, turns(("user", "q"), {"role": "assistant", "tool_calls": [{"function": {}}]})),
        1,
        {"a tool call has no name": [2]},
        {},
    ),
    "a call with half its arguments": (
        "a.jsonl",
        lines(
            GOOD,
            turns(
                ("user", "q"),
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ),
        ),
        1,
        {"arguments of a tool call is not valid JSON": [2]},
        {},
    ),
    "tools that are not JSON": (
        "a.jsonl",
        lines(GOOD, {**GOOD, "tools": "search(query)"}),
        1,
        {"tools is not valid JSON": [2]},
        {},
    ),
    "a loss weight that is text": (
        "a.jsonl",
        lines(GOOD, turns(("user", "q"), {"role": "assistant", "content": "a", "loss_weight": "all"})),
        1,
        {"a loss weight is not a number from 0": [2]},
        {},
    ),
    "a loss weight beyond all floats": (
        "a.jsonl",
        lines(GOOD, turns(("user", "q"), {"role": "assistant", "content": "a", "loss_weight": 10**400})),
        1,
        {"a loss weight is not a number from 0": [2]},
        {},
    ),
    "an empty answer": (
        "a.jsonl",
        lines(ALPACA, {**ALPACA, "output": ""}),
        1,
        {"the answer is empty": [2]},
        {},
    ),
    "an answer that is an object": (
        "a.jsonl",
        lines(ALPACA, {**ALPACA, "output": {"a": 1}}),
        1,
        {'column "output" is not text': [2]},
        {},
    ),
    "an empty instruction": (
        "a.jsonl",
        lines(ALPACA, {**ALPACA, "instruction": ""}),
        1,
        {"the instruction is empty": [2]},
        {},
    ),
    "history that is text": (
        "a.jsonl",
        lines(ALPACA, {**ALPACA, "history": "before"}),
        1,
        {'column "history" is not a list': [2]},
        {},
    ),
    "history that is not pairs": (
        "a.jsonl",
        lines(ALPACA, {**ALPACA, "history": [["before"]]}),
        1,
        {"the history is not pairs of turns": [2]},
        {},
    ),
    "an empty completion": (
        "a.jsonl",
        lines({"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": ""}),
        1,
        {"the completion is empty": [2]},
        {},
    ),
    "two answers that are the same": (
        "a.jsonl",
        lines(PAIR, {**PAIR, "rejected": "c"}),
        1,
        {"chosen and rejected are the same": [2]},
        {},
    ),
    "an empty rejected answer": (
        "a.jsonl",
        lines(PAIR, {**PAIR, "rejected": ""}),
        1,
        {"the rejected answer is empty": [2]},
        {},
    ),
    "a missing chosen answer": (
        "a.jsonl",
        lines(PAIR, {"prompt": "p", "rejected": "r"}),
        1,
        {'there is no column "chosen"': [2]},
        {},
    ),
    "a judgement that is a word": (
        "a.jsonl",
        lines(
            {"prompt": "p", "completion": "c", "label": True},
            {"prompt": "p", "completion": "c", "label": "good"},
        ),
        1,
        {'column "label" is not true or false': [2]},
        {},
    ),
    "a judgement that is a number": (
        "a.jsonl",
        lines(
            {"prompt": "p", "completion": "c", "label": True}, {"prompt": "p", "completion": "c", "label": 0}
        ),
        2,
        {},
        {"a judgement was taken from a number or text": [2]},
    ),
    "a negative token id": (
        "a.jsonl",
        lines(TOKENS, {"input_ids": [-1]}),
        1,
        {"a token id is negative": [2]},
        {},
    ),
    "token ids that are fractions": (
        "a.jsonl",
        lines(TOKENS, {"input_ids": [1.5]}),
        1,
        {'column "input_ids" is not whole numbers': [2]},
        {},
    ),
    "labels of another length": (
        "a.jsonl",
        lines(TOKENS, {"input_ids": [1, 2], "labels": [1]}),
        1,
        {"labels has another length than input_ids": [2]},
        {},
    ),
    "padding": (
        "a.jsonl",
        lines(TOKENS, {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}),
        2,
        {},
        {"padding was left out": [2]},
    ),
    "no tokens": ("a.jsonl", lines(TOKENS, {"input_ids": []}), 1, {"there are no tokens": [2]}, {}),
    "documents that share a row": (
        "a.jsonl",
        lines(
            {"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]},
            {"input_ids": [1, 2, 3], "position_ids": [2, 3, 4]},
            {"input_ids": [1, 2, 3], "seq_lengths": [2, 2]},
            {"input_ids": [1, 2, 3], "seq_lengths": [2, 1], "position_ids": [0, 0, 1]},
        ),
        1,
        {
            "position_ids do not count from 0 in each document": [2],
            "seq_lengths are not those of the tokens": [3],
            "seq_lengths and position_ids tell of different documents": [4],
        },
        {},
    ),
    "masks of other lengths": (
        "a.jsonl",
        lines(TOKENS, {"input_ids": [1, 2], "completion_mask": [1], "labels": [1, 2]}),
        1,
        {"completion_mask has another length than input_ids": [2]},
        {},
    ),
    "turns of Python": (
        "a.jsonl",
        lines(
            {"prompt": "p", "completion": "c"},
            {"prompt": "[{'role': 'user', 'content': 'q'}]", "completion": "[{'role': 'assistant'}]"},
        ),
        1,
        {'column "prompt" holds turns that are not valid JSON': [2]},
        {},
    ),
    "turns where text should be": (
        "a.jsonl",
        lines(
            {"prompt": "p", "response": "c"},
            {"prompt": '[{"role": "user", "content": "q"}]', "response": "c"},
        ),
        1,
        {'column "prompt" holds turns, not text': [2]},
        {},
    ),
    "variables of a template": (
        "a.jsonl",
        lines(
            {**GOOD, "chat_template_kwargs": {"enable_thinking": False}},
            {**GOOD, "chat_template_kwargs": [1]},
            {**GOOD, "chat_template_kwargs": '{"tools": []}'},
        ),
        1,
        {
            'column "chat_template_kwargs" is not an object': [2],
            'column "chat_template_kwargs" gives tools': [3],
        },
        {},
    ),
    "a tool that returns an object": (
        "a.jsonl",
        lines(turns(("user", "q"), ("tool", {"n": 1}), ASSISTANT)),
        1,
        {},
        {"what a tool returned was taken as JSON text": [1]},
    ),
    "a quote in TSV that stays open": (
        "a.tsv",
        b'prompt\tcompletion\np\tc\n"p\nq\n',
        1,
        {"it is not readable as CSV": [3], "it has another number of cells than the header": [4]},
        {},
    ),
    "too few cells": (
        "a.csv",
        b"prompt,completion\np,c\np\n",
        1,
        {"it has another number of cells than the header": [3]},
        {},
    ),
    "too many cells": (
        "a.csv",
        b"prompt,completion\np,c\np,c,d\np,c\n",
        2,
        {"it has another number of cells than the header": [3]},
        {},
    ),
    "a quote that is not closed": (
        "a.csv",
        b'prompt,completion\np,c\np,"c\np,c\n',
        1,
        {"it is not readable as CSV": [3]},
        {},
    ),
    "a cell over several lines": (
        "a.csv",
        b'prompt,completion\np,"c\n\nc"\np,\n',
        1,
        {"the completion is empty": [5]},
        {},
    ),
    "invalid UTF-8 in a cell": (
        "a.csv",
        b"prompt,completion\np,c\np,\xe9\n",
        1,
        {"it is not valid UTF-8": [3]},
        {},
    ),
    "a byte order mark and Windows line ends in CSV": (
        "a.csv",
        b"\xef\xbb\xbfprompt,completion\r\np,c\r\n\r\np,007\r\n",
        2,
        {},
        {},
    ),
}


def config_of(path: Path, on_bad_row: str = "drop") -> DataConfig:
    return DataConfig(path=(str(path),), on_bad_row=on_bad_row)


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("case", CASES)
def test_every_row_is_kept_repaired_or_dropped(tmp_path: Path, case: str) -> None:
    """Each is counted by reason with its file and row, and the rest of the file is read all the same."""
    name, content, kept, dropped, repaired = CASES[case]
    path = write(tmp_path, name, content)
    stream = read_examples(config_of(path))
    assert len(list(stream)) == kept
    (report,) = stream.report.sources
    for found, expected in ((report.dropped, dropped), (report.repaired, repaired)):
        assert {reason: [place.row for place in tally.places] for reason, tally in found.items()} == expected
        assert all(place.file == str(path) for tally in found.values() for place in tally.places)
        assert all(tally.count == len(expected[reason]) for reason, tally in found.items())
    assert report.num_rows == report.num_kept + report.num_dropped
    faults = set(dropped) - {"the text is empty", "there are no tokens"}
    if faults:
        row = min(row for fault in faults for row in dropped[fault])
        with pytest.raises(DataError, match=rf", (line|row) {row}: ") as caught:
            list(read_examples(config_of(path, "stop")))
        assert str(path) in str(caught.value)
    else:
        assert len(list(read_examples(config_of(path, "stop")))) == kept


def test_the_page_names_every_reason() -> None:
    page = " ".join((Path(__file__).parents[3] / "docs" / "data.md").read_text().split())
    for _, _, _, *by_reason in CASES.values():
        for reason in (reason for reasons in by_reason for reason in reasons):
            general = re.sub(r"^turn \d+", "turn N", re.sub(r'column "\w+"', 'column "X"', reason))
            assert f"`{general}`" in page, reason


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "an empty file": ("a.jsonl", b"", "is empty"),
    "only blank lines": ("a.jsonl", b"\n\n", "has no rows"),
    "an empty array": ("a.json", b" [ ] ", "has no rows"),
    "an array that breaks off": ("a.json", b'[{"text": "x"},\n{"te', "line 2, column 2: Unterminated string"),
    "an array without its end": ("a.json", b'[{"text": "x"}', "the file breaks off"),
    "an array with a fault": ("a.json", b'[{"text": "x"},\n{"text": }, {}]', "line 2, column 10"),
    "an array and more": ("a.json", b'[{"text": "x"}] {}', "line 1, column 17: Extra data"),
    "an array that is not UTF-8": (
        "a.json",
        b'[{"text": "x"},\n{"text": "\xe9"}]',
        "line 2 is not valid UTF-8",
    ),
    "an object over many lines": ("a.json", b'{\n  "text": "x"\n}\n', "line 1: it is not valid JSON"),
    "UTF-16": ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "a.jsonl is UTF-16, and text is read as UTF-8"),
    "bytes of a program": ("a.jsonl", b"\x7fELF\x02\x01\x01" + bytes(200), "line 1: it is not valid JSON"),
    "a header alone": ("a.csv", b"prompt,completion\n", "has no rows"),
    "no column that is known": (
        "a.jsonl",
        b'{"body": "x", "n": 1}\n',
        'there is no column "text"; the columns are body, n; choose one with data.text_column, or those of '
        "instructions and answers with data.columns='{instruction: COLUMN, output: COLUMN}'",
    ),
    "images only": ("a.jsonl", lines({**GOOD, "images": ["a.jpg"]}), f"{MEDIA}: column"),
    "not Parquet": ("a.parquet", b"PAR1 not at all", "not readable as parquet"),
    "not Arrow": ("a.arrow", b"ARROW1 not at all", "not readable as arrow"),
    "not packed": ("a.jsonl.gz", b"plain", "cannot read"),
    "another kind": ("a.xlsx", b"PK", "files of this kind are not read"),
}


@pytest.mark.parametrize("on_bad_row", ["drop", "stop"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_holds_nothing_is_refused(tmp_path: Path, case: str, on_bad_row: str) -> None:
    """In one sentence, whatever is said about bad rows."""
    name, content, sentence = REFUSED[case]
    path = write(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        list(read_examples(config_of(path, on_bad_row)))
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_huge_row_is_kept_and_one_without_end_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "x" * 5_000_000}, TEXTS))
    assert [len(example.text) for example in read_examples(config_of(path))] == [5_000_000, 1]  # type: ignore[union-attr]
    monkeypatch.setattr(text_rows, "MOST_ROW_BYTES", 1_000_000)
    stream = read_examples(config_of(path))
    assert [str(example.source) for example in stream] == [f"{path}:2"]
    assert [str(tally) for tally in stream.report.sources[0].dropped.values()] == [f"1 ({path}:1)"]


def test_many_bad_rows_are_counted_and_the_first_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines(TEXTS, *[{"body": "x"}] * 20))
    stream = read_examples(config_of(path))
    assert len(list(stream)) == 1
    assert stream.report.lines() == [
        f"{path}: text; 21 rows read, 1 example kept, 20 dropped",
        f'  dropped: there is no column "text": 20 ({path}:2, 3, 4, 5, 6, ...)',
    ]
