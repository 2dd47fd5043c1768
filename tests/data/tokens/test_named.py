"""Templates that go by a name: each writes what the model's own template writes, and trains on answers."""

from __future__ import annotations

import json
import re
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megatrain.data.example import Message
from megatrain.data.templates import SPECIAL_TOKENS, named_template, template_names, why_not_suited
from megatrain.data.tokenizer import add_tokens, train_tokenizer
from megatrain.data.tokens.template import ChatTemplate, TrainOn
from tests.data.tokens.published import FOLDER, needs_tokenizers

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
OF_TRL = Path(trl.__file__).parent / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

HERE = [{"role": "user", "content": "Question 1"}, {"role": "assistant", "content": "Answer 1"}]
MORE = [{"role": "user", "content": " Question 2\n"}, {"role": "assistant", "content": "Answer 2 "}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
ANSWER_BY_USER = {"role": "user", "content": "<tool_response>B</tool_response>"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "c"]}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def told(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": HERE,
    "system": SYSTEM + HERE,
    "several turns": SYSTEM + HERE + MORE,
    "a question at the end": HERE + MORE[:1],
    "system in the middle": HERE + SYSTEM + MORE,
    "call": [HERE[0], said("", tool_calls=[CALL]), told("3"), said("It is 3.")],
    "words and two calls": [HERE[0], said("Wait.", tool_calls=[CALL, CALL]), told("3"), told("4"), said("7")],
    "bare call": [HERE[0], said("", tool_calls=[CALL["function"]])],
    "thought": [HERE[0], said("A", reasoning_content="\nB\n"), MORE[0], said("C", reasoning_content="D")],
    "thought in the content": [HERE[0], said("<think>\nB\n</think>\n\nA"), MORE[0], said("<think>D")],
    "thought before a call": [
        *(SYSTEM + HERE[:1]),
        said("", reasoning_content="B", tool_calls=[CALL]),
        told("3"),
        said("\nA", reasoning_content="C"),
    ],
    "nothing said": [HERE[0], said(""), *MORE],
    "an answer of a tool by the user": [HERE[0], said("A"), ANSWER_BY_USER, said("C", reasoning_content="D")],
}


@cache
def own_template(place: str) -> str:
    """Return the template that a model has: of a tokenizer in shared/data, or as TRL ships it."""
    kind, name = place.split(":")
    if kind == "trl":
        return (OF_TRL / f"{name}.jinja").read_text()
    return str(json.loads((FOLDER / name / "tokenizer_config.json").read_text())["chat_template"])


def rendered(template: str, turns: list[dict[str, Any]], **more: Any) -> str | None:
    """Return what transformers writes; None: the template refuses."""
    try:
        (text,), _ = render_jinja_template([turns], chat_template=template, **SPECIAL, **more)
    except Exception:
        return None
    return str(text)


WAYS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False},
]
OWN = [
    pytest.param("qwen2.5", "shared:qwen2.5", marks=needs_tokenizers),
    pytest.param("qwen3", "shared:qwen3-config-only", marks=needs_tokenizers),
    pytest.param("llama3", "shared:llama3.1", marks=needs_tokenizers),
    ("llama3", "trl:llama3"),
    ("qwen2.5", "trl:qwen2_5"),
    ("qwen3", "trl:qwen3"),
    ("gemma", "trl:gemma"),
    ("phi3", "trl:phi3"),
]


@pytest.mark.parametrize(("name", "place"), OWN)
def test_a_named_template_writes_what_the_models_own_writes(name: str, place: str) -> None:
    own, ours = own_template(place), named_template(name)
    assert ours is not None
    assert ours != own, "written anew"
    num_equal = 0
    for conversation, turns in CONVERSATIONS.items():
        for tools in (None, [ADD], [ADD, ADD]):
            for more in WAYS:
                text = rendered(own, turns, tools=tools, **more)
                written = rendered(ours, turns, tools=tools, **more)
                if name == "phi3" and told("3") in turns:
                    assert written is None, "which the model's own leaves out in silence"
                elif text is not None:
                    assert written == text, (conversation, tools, more)
                    num_equal += 1
    assert num_equal >= 45


BY_HAND = {
    "alpaca": "<s>Be brief.\n\n### Instruction:\nQuestion 1\n\n### Response:\n[Answer 1</s>]\n\n"
    "### Instruction:\n Question 2\n\n\n### Response:\n[Answer 2 </s>]",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQuestion 1<|im_end|>\n"
    "<|im_start|>assistant\n[Answer 1<|im_end|>\n]<|im_start|>user\n Question 2\n<|im_end|>\n"
    "<|im_start|>assistant\n[Answer 2 <|im_end|>\n]",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nQuestion 1<end_of_turn>\n<start_of_turn>model\n"
    "[Answer 1<end_of_turn>\n]<start_of_turn>user\nQuestion 2<end_of_turn>\n<start_of_turn>model\n"
    "[Answer 2<end_of_turn>\n]",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nQuestion 1 [/INST][ Answer 1 </s>]"
    "<s>[INST] Question 2 [/INST][ Answer 2 </s>]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nQuestion 1<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Answer 1<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nQuestion 2<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Answer 2<|eot_id|>]",
    "mistral": "<s>[INST] Be brief.\n\nQuestion 1[/INST][ Answer 1</s>]"
    "[INST]  Question 2\n[/INST][ Answer 2</s>]",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nQuestion 1<|end|>\n<|assistant|>\n[Answer 1<|end|>\n]"
    "<|user|>\n Question 2\n<|end|>\n<|assistant|>\n[Answer 2 <|end|>\n</s>]",
    "plain": "<s>### System:\nBe brief.\n### User:\nQuestion 1\n### Assistant:\n[Answer 1</s>]"
    "### User:\n Question 2\n\n### Assistant:\n[Answer 2 </s>]",
    "vicuna": "<s>Be brief. USER: Question 1 ASSISTANT:[ Answer 1</s>]"
    "USER:  Question 2\n ASSISTANT:[ Answer 2 </s>]",
}
BY_HAND |= {"qwen2.5": BY_HAND["chatml"]}
BY_HAND |= {"qwen3": BY_HAND["chatml"].replace("[Answer 2", "[<think>\n\n</think>\n\nAnswer 2")}


@pytest.mark.parametrize("name", template_names())
def test_what_a_named_template_writes_and_what_is_trained_on(name: str) -> None:
    turns = CONVERSATIONS["several turns"]
    source = named_template(name)
    assert source is not None
    template = ChatTemplate(source, SPECIAL, date(2026, 11, 23))
    messages = [Message(role=turn["role"], content=turn["content"]) for turn in turns]
    text, spans = template.spans(messages, (), TrainOn())
    shown = text
    for start, end in reversed(spans):
        shown = f"{shown[:start]}[{shown[start:end]}]{shown[end:]}"
    assert shown == BY_HAND[name]
    prompt = rendered(source, turns[:-1], add_generation_prompt=True)
    assert prompt is not None
    assert text.startswith(prompt), "what a model is asked with begins what it was trained on"


def test_all_names_are_there_and_know_their_special_tokens() -> None:
    assert set(template_names()) == set(BY_HAND)
    assert len(template_names()) == 11
    for name in template_names():
        source = named_template(name) or ""
        text = rendered(source, SYSTEM + HERE) or ""
        words = set(re.findall(r"<\|?[a-z]\w+\|?>", text)) - {"<think>"}
        assert words == set(SPECIAL_TOKENS.get(name, ())), name
    assert named_template("no such") is None


def test_words_without_a_token_are_named() -> None:
    tokenizer = train_tokenizer(["a b"], 260)
    assert why_not_suited("plain", tokenizer) is why_not_suited("my.jinja", tokenizer) is None
    assert (why_not_suited("chatml", tokenizer) or "").startswith(
        "data.chat_template=chatml writes <|im_start|>, <|im_end|>, for which this tokenizer has no token"
    )
    add_tokens(tokenizer, ["<|im_start|>"])
    assert "writes <|im_end|>, for" in (why_not_suited("chatml", tokenizer) or "")
    add_tokens(tokenizer, ["<|im_end|>"])
    assert why_not_suited("chatml", tokenizer) is None
