"""Each format by hand: what a row means, and how a source's format is told from its columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.sections.data import COLUMNS, FORMATS, DataConfig
from megatrain.data.example import (
    ChatExample,
    CompletionExample,
    Example,
    KtoExample,
    Message,
    PreferenceExample,
    Source,
    TokensExample,
    texts_of,
)
from megatrain.data.formats.detect import Converter, Recipe, detect
from megatrain.data.read.examples import read_examples
from megatrain.data.row import RowError
from megatrain.errors import DataError


def system(content: str) -> Message:
    return Message(role="system", content=content)


def user(content: str, weight: float | None = None, **more: Any) -> Message:
    return Message(role="user", content=content, loss_weight=weight, **more)


def assistant(content: str, weight: float | None = None, **more: Any) -> Message:
    return Message(role="assistant", content=content, loss_weight=weight, **more)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


SEARCH = {"type": "function", "function": {"name": "search", "parameters": {}}}
ASKED = [{"role": "user", "content": "q"}]
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}

# A row, what it is called, and what it means: a kind of example and its fields.
CASES: dict[str, tuple[dict[str, Any], str, type, dict[str, Any]]] = {
    "alpaca": (
        {"instruction": "add", "input": "1 2", "output": "3", "system": "s", "history": [["a", "b"]]},
        "alpaca",
        ChatExample,
        {"messages": (system("s"), user("a"), assistant("b"), user("add\n1 2"), assistant("3"))},
    ),
    "alpaca with the text it was made into": (
        {"instruction": "add", "input": "", "output": "3", "text": "### Instruction: add"},
        "alpaca",
        ChatExample,
        {"messages": (user("add"), assistant("3"))},
    ),
    "question and answer": (
        {"question": "q", "answer": "a", "source": "book"},
        "alpaca (instruction in question, output in answer)",
        ChatExample,
        {"messages": (user("q"), assistant("a"))},
    ),
    "input and output": (
        {"input": "q", "output": "a"},
        "alpaca (instruction in input, input in no further input)",
        ChatExample,
        {"messages": (user("q"), assistant("a"))},
    ),
    "prompt and response": (
        {"prompt": "q", "response": "a"},
        "alpaca (instruction in prompt, output in response)",
        ChatExample,
        {"messages": (user("q"), assistant("a"))},
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "search", "arguments": {"for": "x"}}'},
                {"from": "observation", "value": "found"},
                {"from": "gpt", "value": "a"},
            ],
            "system": "s",
            "tools": '[{"name": "search", "parameters": {}}]',
        },
        "sharegpt (messages in conversations)",
        ChatExample,
        {
            "messages": (
                system("s"),
                user("q"),
                assistant("", tool_calls=(call("search", **{"for": "x"}),)),
                Message(role="tool", content="found"),
                assistant("a"),
            ),
            "tools": (SEARCH,),
        },
    ),
    "a system turn goes before the column": (
        {"messages": [{"role": "system", "content": "turn"}, *ASKED, GOOD], "system": "column"},
        "messages",
        ChatExample,
        {"messages": (system("turn"), user("q"), assistant("good"))},
    ),
    "messages with tool calls": (
        {
            "messages": [
                {"role": "developer", "content": "s"},
                *ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "function": {"name": "search", "arguments": '{"n": 1}'}},
                        {"id": "c2", "function": {"name": "open", "arguments": {}}},
                    ],
                },
                {"role": "tool", "tool_call_id": "c2", "content": "opened"},
                {"role": "assistant", "content": "a", "reasoning_content": "hm", "weight": 0},
            ],
            "tools": [SEARCH],
        },
        "messages",
        ChatExample,
        {
            "messages": (
                system("s"),
                user("q"),
                assistant("", tool_calls=({"id": "c1"} | call("search", n=1), {"id": "c2"} | call("open"))),
                Message(role="tool", content="opened", name="open", tool_call_id="c2"),
                assistant("a", 0.0, reasoning="hm"),
            ),
            "tools": (SEARCH,),
        },
    ),
    "typed parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "hm"},
                        {"type": "tool_call", "value": '{"name": "search", "arguments": {}}'},
                        {"type": "text", "text": "a"},
                        {"type": "text", "text": "b"},
                    ],
                    "loss_weight": 0.5,
                },
            ]
        },
        "messages",
        ChatExample,
        {
            "messages": (
                user("q", 0.0, parts=("q",)),
                assistant("ab", 0.5, parts=("a", "b"), reasoning="hm", tool_calls=(call("search"),)),
            )
        },
    ),
    "prompt and completion": (
        {"prompt": "p", "completion": " c"},
        "prompt_completion",
        CompletionExample,
        {"prompt": "p", "completion": " c"},
    ),
    "prompt and completion of turns": (
        {"prompt": ASKED, "completion": [GOOD], "tools": [SEARCH]},
        "prompt_completion",
        ChatExample,
        {"messages": (user("q"), assistant("good")), "num_prompt": 1, "tools": (SEARCH,)},
    ),
    "a solution beside the number that it comes to": (
        {"problem": "1 + 1", "solution": "One and one is 2.", "answer": "2"},
        "alpaca (instruction in problem, output in solution)",
        ChatExample,
        {"messages": (user("1 + 1"), assistant("One and one is 2."))},
    ),
    "prompt and completion of turns as JSON text": (
        {"prompt": json.dumps(ASKED), "completion": json.dumps([GOOD])},
        "prompt_completion",
        ChatExample,
        {"messages": (user("q"), assistant("good")), "num_prompt": 1},
    ),
    "preference of turns as JSON text": (
        {"prompt": json.dumps(ASKED), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
        "preference",
        PreferenceExample,
        {"prompt": (user("q"),), "chosen": (assistant("good"),), "rejected": (assistant("bad"),)},
    ),
    "preference of whole conversations as JSON text": (
        {"chosen": json.dumps([*ASKED, GOOD]), "rejected": json.dumps([*ASKED, BAD])},
        "preference",
        PreferenceExample,
        {"prompt": (user("q"),), "chosen": (assistant("good"),), "rejected": (assistant("bad"),)},
    ),
    "judged turns as JSON text": (
        {"prompt": json.dumps(ASKED), "completion": json.dumps([GOOD]), "label": True},
        "kto",
        KtoExample,
        {"prompt": (user("q"),), "completion": (assistant("good"),), "is_good": True},
    ),
    "answers that begin with a bracket are text": (
        {"prompt": ASKED, "chosen": "[1, 2]", "rejected": "[link](there)"},
        "preference",
        PreferenceExample,
        {"prompt": (user("q"),), "chosen": (assistant("[1, 2]"),), "rejected": (assistant("[link](there)"),)},
    ),
    "an answer that is JSON is text": (
        {"prompt": ASKED, "completion": '[{"role": "cook", "content": "soup"}]'},
        "prompt_completion",
        ChatExample,
        {"messages": (user("q"), assistant('[{"role": "cook", "content": "soup"}]')), "num_prompt": 1},
    ),
    "conversations with system prompts of their own": (
        {
            "chosen": [{"role": "system", "content": "s"}, *ASKED, GOOD],
            "rejected": [{"role": "system", "content": "t"}, *ASKED, BAD],
        },
        "preference",
        PreferenceExample,
        {
            "prompt": (),
            "chosen": (system("s"), user("q"), assistant("good")),
            "rejected": (system("t"), user("q"), assistant("bad")),
        },
    ),
    "what only the chat template reads": (
        {
            "messages": [*ASKED, {**GOOD, "tool_plan": "p", "channel": None}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "messages",
        ChatExample,
        {
            "messages": (user("q"), assistant("good", more={"tool_plan": "p"})),
            "options": {"enable_thinking": False},
        },
    ),
    "a tool that returns an object": (
        {"messages": [*ASKED, {"role": "tool", "name": "f", "content": {"n": 1, "s": "\u00e9"}}, GOOD]},
        "messages",
        ChatExample,
        {
            "messages": (
                user("q"),
                Message(role="tool", content='{"n": 1, "s": "\u00e9"}', name="f"),
                assistant("good"),
            )
        },
    ),
    "preference of text": (
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        "preference",
        PreferenceExample,
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
    ),
    "preference of turns": (
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        "preference",
        PreferenceExample,
        {"prompt": (user("q"),), "chosen": (assistant("good"),), "rejected": (assistant("bad"),)},
    ),
    "preference of whole conversations": (
        {"prompt": "q", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD], "messages": [*ASKED, GOOD]},
        "preference",
        PreferenceExample,
        {"prompt": (user("q"),), "chosen": (assistant("good"),), "rejected": (assistant("bad"),)},
    ),
    "preference of whole texts": (
        {"chosen": "Human: q Assistant: good", "rejected": "Human: q Assistant: bad"},
        "preference",
        PreferenceExample,
        {"prompt": "Human: q Assistant:", "chosen": " good", "rejected": " bad"},
    ),
    "preference after a conversation": (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        "preference (messages in conversations)",
        PreferenceExample,
        {"prompt": (user("q"),), "chosen": (assistant("good"),), "rejected": (assistant("bad"),)},
    ),
    "preference after an instruction": (
        {"instruction": "q", "input": "i", "chosen": "good", "rejected": "bad"},
        "preference",
        PreferenceExample,
        {"prompt": (user("q\ni"),), "chosen": (assistant("good"),), "rejected": (assistant("bad"),)},
    ),
    "judged text": (
        {"prompt": "p", "completion": "good", "label": True},
        "kto",
        KtoExample,
        {"prompt": "p", "completion": "good", "is_good": True},
    ),
    "judged turns": (
        {"messages": [*ASKED, BAD], "label": False},
        "kto",
        KtoExample,
        {"prompt": (user("q"),), "completion": (assistant("bad"),), "is_good": False},
    ),
    "a judged answer to an instruction": (
        {"instruction": "q", "output": "good", "kto_tag": True},
        "kto (label in kto_tag)",
        KtoExample,
        {"prompt": (user("q"),), "completion": (assistant("good"),), "is_good": True},
    ),
    "token ids": (
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "text": "abc"},
        "tokens",
        TokensExample,
        {"input_ids": (1, 2, 3), "labels": (-100, 2, 3)},
    ),
    "token ids with TRL's mask": (
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        "tokens",
        TokensExample,
        {"input_ids": (1, 2, 3), "labels": (-100, 2, 3)},
    ),
    "token ids with labels and both of TRL's masks": (
        {
            "input_ids": [1, 2, 3, 4, 5],
            "labels": [1, -100, 3, 4, 5],
            "completion_mask": [0, 1, 1, 1, 1],
            "assistant_masks": [1, 1, 1, 0, 1],
        },
        "tokens",
        TokensExample,
        {"input_ids": (1, 2, 3, 4, 5), "labels": (-100, -100, 3, -100, 5)},
    ),
}


def read(folder: Path, *rows: dict[str, Any], **settings: Any) -> tuple[list[Example], str]:
    path = folder / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    stream = read_examples(DataConfig(path=(str(path),), **settings))
    return list(stream), stream.report.sources[0].format


@pytest.mark.parametrize("case", CASES)
def test_a_row_means_what_its_columns_say(tmp_path: Path, case: str) -> None:
    row, name, form, fields = CASES[case]
    examples, found = read(tmp_path, row)
    assert found == name
    assert examples == [form(source=Source(file=str(tmp_path / "a.jsonl"), row=1), **fields)]


@pytest.mark.parametrize(
    "told",
    [
        {"position_ids": [0, 1, 2, 0, 1]},
        {"seq_lengths": [3, 2]},
        {"attention_mask": [1, 1, 1, 2, 2]},
        {"position_ids": [0, 1, 2, 0, 1], "seq_lengths": [3, 2], "attention_mask": [1, 1, 1, 1, 1]},
    ],
)
def test_packed_token_rows_are_taken_apart(tmp_path: Path, told: dict[str, Any]) -> None:
    """As TRL and LLaMA-Factory pack them: no document may see another."""
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, 7, -100, 9], **told}
    padded = {name: [*values, *[0] * (name != "seq_lengths")] for name, values in row.items()}
    if "attention_mask" not in padded:
        padded["attention_mask"] = [1, 1, 1, 1, 1, 0]
    for one in (row, padded):
        examples, _ = read(tmp_path, one)
        assert [(example.input_ids, example.labels) for example in examples] == [  # type: ignore[union-attr]
            ((5, 6, 7), (-100, 6, 7)),
            ((8, 9), (-100, 9)),
        ]


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    turn = {"role": "assistant", "content": "a", "tool_plan": "p", "channel": "final"}
    path.write_text(json.dumps({"messages": [*ASKED, turn], "mask": [1], "id": 7, "images": []}))
    stream = read_examples(DataConfig(path=(str(path),)))
    assert len(list(stream)) == 1
    assert stream.report.lines()[1:] == [
        "  columns that are not read: id, mask",
        "  keys of turns for the chat template alone: channel, tool_plan",
    ]


def test_a_class_label_is_no_judgement(tmp_path: Path) -> None:
    """0 and 1 beside text or an instruction are classes; a conversation or a completion is judged by them."""
    assert read(tmp_path, {"text": "x", "label": 1})[1] == "text"
    assert read(tmp_path, {"instruction": "i", "output": "o", "label": 0})[1] == "alpaca"
    assert read(tmp_path, {"prompt": "p", "completion": "c", "label": 0})[1] == "kto"
    assert read(tmp_path, {"messages": [*ASKED, BAD], "label": 0})[1] == "kto"


def test_most_of_the_first_rows_decide(tmp_path: Path) -> None:
    chat = {"messages": [*ASKED, GOOD]}
    examples, name = read(tmp_path, {"text": "a line of its own"}, chat, chat)
    assert (name, [example.source.row for example in examples]) == ("messages", [2, 3])


def test_settings_go_before_what_is_found(tmp_path: Path) -> None:
    row = {"q": "q", "a": "a", "text": "x", "title": "t"}
    examples, name = read(tmp_path, row, columns={"instruction": "q", "output": "a"})
    assert (name, type(examples[0])) == ("alpaca (instruction in q, output in a)", ChatExample)
    examples, _ = read(tmp_path, row, columns={"prompt": "q", "response": "a"})  # LLaMA-Factory's names
    assert examples[0] == ChatExample(source=examples[0].source, messages=(user("q"), assistant("a")))
    assert read(tmp_path, row, text_column="title")[1] == "text (text in title)"
    assert read(tmp_path, {"prompt": "p", "completion": "c"}, format="alpaca")[1] == (
        "alpaca (instruction in prompt, output in completion)"
    )


def test_tags_name_the_parts_of_turns(tmp_path: Path) -> None:
    row = {"talk": [{"who": "Q", "says": "q"}, {"who": "A", "says": "a"}]}
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "Q", "assistant_tag": "A"}
    (example,), _ = read(tmp_path, row, columns={"messages": "talk"}, tags=tags)
    assert example == ChatExample(source=example.source, messages=(user("q"), assistant("a")))


def test_a_self_instruct_row_is_an_example_for_each_instance(tmp_path: Path) -> None:
    row = {"instruction": "add", "instances": [{"input": "1 2", "output": "3"}, {"input": "", "output": "0"}]}
    examples, _ = read(tmp_path, row)
    place = Source(file=str(tmp_path / "a.jsonl"), row=1)
    assert examples == [
        ChatExample(source=place, messages=(user("add\n1 2"), assistant("3"))),
        ChatExample(source=place, messages=(user("add"), assistant("0"))),
    ]


_WORDS = st.sampled_from(
    ["", "q", "[]", '[{"role": "user"}]', "{", "true", "role", "user", "assistant", "text"]
)
_SCALARS = st.none() | st.booleans() | st.integers(-1, 3) | st.floats() | _WORDS
_KEYS = st.sampled_from(
    ["role", "from", "content", "value", "type", "tool_calls", "function", "name", "arguments", "instances"]
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)
_ROWS = st.dictionaries(st.sampled_from(COLUMNS), _JSON, max_size=5)


@settings(deadline=None, max_examples=80)
@given(row=_ROWS, name=st.sampled_from(["auto", *FORMATS]))
def test_no_row_whatever_is_more_than_a_row_error(row: dict[str, Any], name: str) -> None:
    """It is an example that can be looked at, or its fault has a name."""
    recipe = detect(row, Recipe(format=name), text_column="text")
    if recipe is not None:
        try:
            examples = Converter(recipe).examples(row, Source(file="a", row=1))
        except RowError:
            return
        assert examples
        assert all(isinstance(text, str) for example in examples for text in texts_of(example))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"format": "alpaca"},
            'there is no column "instruction"; the columns are Q, A; name it with data.columns=',
        ),
        (
            {"columns": {"instruction": "q", "output": "A"}},
            'there is no column "q"; the columns are Q, A; name it',
        ),
        ({"columns": {"output": "A"}}, 'there is no column "text"; the columns are Q, A; choose one with'),
        (
            {"format": "text"},
            'there is no column "text"; the columns are Q, A; choose one with data.text_column',
        ),
    ],
)
def test_columns_that_are_called_otherwise_are_to_be_named(
    tmp_path: Path, more: dict[str, Any], expected: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"Q": "1 + 1", "A": "2"}\n')
    with pytest.raises(DataError) as caught:
        list(read_examples(DataConfig.model_validate({"path": str(tmp_path / "a.jsonl"), **more})))
    assert expected in str(caught.value)
