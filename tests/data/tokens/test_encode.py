"""Masks: equal to TRL's where TRL has them, exact by offsets, and refused where they could not be."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest

from megatrain.data.example import (
    ChatExample,
    CompletionExample,
    Example,
    KtoExample,
    Message,
    PreferenceExample,
    Source,
    TextExample,
    TokensExample,
)
from megatrain.data.flagged_tokens import IDS, START, TRAINED, Words
from megatrain.data.packing import split_long
from megatrain.data.pairs import Judged
from megatrain.data.tokenizer import train_tokenizer
from megatrain.data.tokens.encode import EncoderRecipe, Refused, show
from megatrain.data.tokens.forms import Form
from megatrain.data.tokens.processes import encode_all
from megatrain.data.tokens.template import TrainOn, template_source
from megatrain.errors import ConfigError, DataError
from megatrain.objective.registry import OBJECTIVES
from tests.data.tokens.published import needs_tokenizers, published

WHERE = Source(file="chats.jsonl", row=7)
TAGGED = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template as most are."""
THINKS = TAGGED.replace(
    "{{ message['content'] }}",
    "{{ message.reasoning_content | default('') }}{{ message['content'] }}"
    "{{ message.tool_calls | default([]) | tojson }}",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["<user>hello<assistant>world and more\n"] * 9, 300)


def recipe(tokenizer: Any, template: Any = TAGGED, **train_on: Any) -> EncoderRecipe:
    return EncoderRecipe(
        tokenizer=tokenizer,
        template=template,
        train_on=TrainOn(**train_on),
        end_id=tokenizer.eos_token_id,
    )


def chat(*turns: tuple[str, str], **more: Any) -> ChatExample:
    messages = tuple(Message(role=role, content=text, **more) for role, text in turns)
    return ChatExample(source=WHERE, messages=messages)


def encoded(tokenizer: Any, example: Example, template: str | None = TAGGED, **train_on: Any) -> Words:
    (words,) = recipe(tokenizer, template, **train_on).make().encode([example])
    assert not isinstance(words, Refused), words
    return words


def shown(tokenizer: Any, *arguments: Any, **more: Any) -> str:
    pieces = show(encoded(tokenizer, *arguments, **more), tokenizer)
    return "".join(f"[[{text}]]" if is_trained else text for text, is_trained in pieces)


def refusal(tokenizer: Any, example: Example, template: str | None = TAGGED, **train_on: Any) -> str:
    (result,) = recipe(tokenizer, template, **train_on).make().encode([example])
    assert isinstance(result, Refused)
    return result.reason


# -- TRL -------------------------------------------------------------------------------------------------


def random_chats(count: int, *, calls_tools: bool) -> list[ChatExample]:
    draw = random.Random(0)
    words = [
        "the",
        "a",
        "naïve",
        "\U0001f600",
        "snow",
        "\n\n",
        "  ",
        "x=1;",
        "你好",
        "end.",
        "<b>",
        "\t",
        "ok",
    ]

    def text(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randrange(1, most)))

    examples = []
    for row in range(count):
        turns = [Message(role="system", content=text(9))] if draw.random() < 0.3 else []
        has_tools = calls_tools and draw.random() < 0.4
        for _ in range(draw.randrange(1, 5)):
            turns.append(Message(role="user", content=text(40)))
            if has_tools and draw.random() < 0.6:
                call = {"type": "function", "function": {"name": "find", "arguments": {"what": text(4)}}}
                said = draw.choice(["", text(5)])
                turns.append(
                    Message(role="assistant", content=said, tool_calls=(call,) * draw.randrange(1, 3))
                )
                turns += [Message(role="tool", content=text(6), name="find")] * draw.randrange(1, 3)
            turns.append(Message(role="assistant", content=text(60)))
        tools = ({"type": "function", "function": {"name": "find", "parameters": {}}},) if has_tools else ()
        source = Source(file="chats.jsonl", row=row)
        examples.append(ChatExample(source=source, messages=tuple(turns), tools=tools))
    return examples


@needs_tokenizers
@pytest.mark.parametrize(("name", "calls_tools"), [("llama3.1", False), ("qwen2.5", True)])
def test_ids_and_masks_equal_trl_s(name: str, calls_tools: bool) -> None:
    """500 rows of several turns and tools, each whole and truncated."""
    utils = pytest.importorskip("trl.chat_template_utils")
    tokenizer = published(name)
    examples = random_chats(500, calls_tools=calls_tools)
    training = utils.get_training_chat_template(tokenizer)
    assert training is not None
    assert training != tokenizer.chat_template
    num_truncated = 0
    results = recipe(tokenizer, tokenizer.chat_template).make().encode(examples)
    for example, words in zip(examples, results, strict=True):
        assert not isinstance(words, Refused)
        theirs = tokenizer.apply_chat_template(
            [Form().mapping(message) for message in example.messages],
            tools=list(example.tools) or None,
            chat_template=training,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = np.array(theirs["input_ids"]), np.array(theirs["assistant_masks"]) == 1
        assert np.array_equal(words & IDS, ids), example.source
        assert np.array_equal(words & TRAINED != 0, mask), example.source
        pieces, _ = split_long(words, 150, "truncate")
        assert len(pieces) == int(mask[:150].any())  # TRL too drops a row that is all masked
        for piece in pieces:
            num_truncated += len(words) > 150
            assert np.array_equal(piece & IDS, ids[:150])
            assert np.array_equal(piece & TRAINED != 0, mask[:150])
    assert num_truncated > 100


@needs_tokenizers
@pytest.mark.parametrize("name", ["llama3.1", "qwen2.5"])
def test_spans_of_a_template_equal_those_of_its_generation_marks(name: str) -> None:
    """TRL's training templates by their marks, and without them by what each message wrote."""
    utils = pytest.importorskip("trl.chat_template_utils")
    tokenizer = published(name)
    training = utils.get_training_chat_template(tokenizer)
    examples = random_chats(40, calls_tools=name == "qwen2.5")
    marked = recipe(tokenizer, training).make().encode(examples)
    own = recipe(tokenizer, tokenizer.chat_template).make().encode(examples)
    for with_marks, without in zip(marked, own, strict=True):
        assert np.array_equal(with_marks, without)  # type: ignore[arg-type]


# -- what is trained on ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ({}, "<user>a<assistant>[[b<|endoftext|>]]<user>c<assistant>[[d<|endoftext|>]]"),
        ({"last_only": True}, "<user>a<assistant>b<|endoftext|><user>c<assistant>[[d<|endoftext|>]]"),
        ({"roles": ("user",)}, "<user>[[a]]<assistant>b<|endoftext|><user>[[c]]<assistant>d<|endoftext|>"),
    ],
)
def test_roles_and_the_last_turn(tokenizer: Any, train_on: dict[str, Any], expected: str) -> None:
    example = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert shown(tokenizer, example, **train_on) == expected


def test_a_beginning_of_the_text_is_no_part_of_the_first_turn(tokenizer: Any) -> None:
    """Llama 3 writes it in the loop, with the first message; a chat may begin with the assistant."""
    llama = (
        "{% for message in messages %}{% set content = '<' + message['role'] + '>' + message['content'] %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
        "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = bos = "<|endoftext|>"
    greeting = chat(("assistant", "a"), ("user", "b"), ("assistant", "c"))
    end = "<|endoftext|>"
    for train_on, expected in (
        ({}, f"{bos}<assistant>[[a{end}]]<user>b<assistant>[[c{end}]]"),
        ({"roles": ("user",)}, f"{bos}<assistant>a{end}<user>[[b]]<assistant>c{end}"),
    ):
        assert shown(tokenizer, greeting, llama, **train_on) == expected
    asked = chat(("user", "b"), ("assistant", "c"))
    expected = f"{bos}<user>[[b]]<assistant>c{end}"
    assert shown(tokenizer, asked, llama, roles=("user",)) == expected


def test_settings_are_read() -> None:
    assert TrainOn.of("assistant", reasoning=True) == TrainOn()
    assert TrainOn.of("last", reasoning=False) == TrainOn(last_only=True, reasoning=False)
    assert TrainOn.of("all", reasoning=True) == TrainOn(everything=True)
    assert TrainOn.of(("user", "tool"), reasoning=True) == TrainOn(roles=("user", "tool"))


def test_generation_marks_go_before_what_is_found(tokenizer: Any) -> None:
    """The template says that the model writes the content alone; the end token is then named in a warning."""
    template = (
        "{% for message in messages %}<{{ message.role }}>"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
        "<|endoftext|>"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    example = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    text = "<user>a<assistant>[[b]]<|endoftext|><user>c<assistant>[[d]]<|endoftext|>"
    assert shown(tokenizer, example, template) == text
    warning = recipe(tokenizer, template).make().untrained_end()
    assert warning is not None
    assert "ends with <|endoftext|>, which is not trained on" in warning
    assert recipe(tokenizer).make().untrained_end() is None


def test_template_without_an_end_is_named(tokenizer: Any) -> None:
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    warning = str(recipe(tokenizer, template).make().untrained_end())
    assert "has no token that ends it" in warning
    assert "end it with the tokenizer's <|endoftext|>" in warning
    assert "let {% generation %} enclose" not in warning, "there is nothing to enclose"


@pytest.mark.parametrize("name", ["llama3.1", "qwen2.5"])
@needs_tokenizers
def test_real_templates_train_on_their_end(name: str) -> None:
    tokenizer = published(name)
    assert recipe(tokenizer, tokenizer.chat_template).make().untrained_end() is None
    assert recipe(tokenizer, template_source("plain", tokenizer)).make().untrained_end() is None


def test_weights_are_0_or_1(tokenizer: Any) -> None:
    example = chat(("user", "a"), ("assistant", "b"), loss_weight=0.5)
    assert refusal(tokenizer, example).startswith("loss_weight 0.5 is neither 0 nor 1")


def test_reasoning_that_the_template_changes_is_refused_where_it_is_not_trained_on(tokenizer: Any) -> None:
    thought = "{{ message.reasoning_content | default('') | FILTER }}"
    content = "{{ message['content'] }}"
    messages = (Message(role="user", content="a"), Message(role="assistant", content="b", reasoning=" why "))
    example = ChatExample(source=WHERE, messages=messages)
    trims, shouts, turns = (
        TAGGED.replace(content, thought.replace("FILTER", name) + content)
        for name in ("trim", "upper", "reverse | join")
    )
    assert shown(tokenizer, example, trims) == "<user>a<assistant>[[whyb<|endoftext|>]]"
    assert shown(tokenizer, example, trims, reasoning=False) == "<user>a<assistant>why[[b<|endoftext|>]]"
    assert shown(tokenizer, example, shouts) == "<user>a<assistant>[[ WHY b<|endoftext|>]]"
    assert shown(tokenizer, example, shouts, reasoning=False) == "<user>a<assistant> WHY [[b<|endoftext|>]]"
    assert shown(tokenizer, example, turns) == "<user>a<assistant>[[ yhw b<|endoftext|>]]"
    reason = "it is not known where the chat template writes the reasoning, which is not trained on"
    assert refusal(tokenizer, example, turns, reasoning=False) == reason


# -- templates that are not understood, or fail ----------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "everything"),
    [
        ("{% for n in range(messages|length) %}{{ messages[n].content }}{% endfor %}", "a[[b]]"),
        ("{{ messages | map(attribute='content') | join(' ') }}", "a[[ b]]"),
    ],
)
def test_template_that_does_not_go_through_the_messages_trains_on_everything_or_is_refused(
    tokenizer: Any, template: str, everything: str
) -> None:
    example = chat(("user", "a"), ("assistant", "b"))
    with pytest.raises(
        ConfigError, match=r"writes nothing.* of the assistant.*generation.*data\.train_on=all"
    ):
        recipe(tokenizer, template).make().encode([example])
    assert shown(tokenizer, example, template, everything=True) == everything


def test_the_day_of_a_template_stays(tokenizer: Any) -> None:
    """A template that asks for the time is told a day's midnight, and not when it is rendered."""
    template = "{{ strftime_now('%d %b %Y %H:%M') }} " + TAGGED
    on_that_day = replace(recipe(tokenizer, template), day=date(2025, 3, 9))
    assert on_that_day.asks_day
    (words,) = on_that_day.make().encode([chat(("user", "a"), ("assistant", "b"))])
    assert not isinstance(words, Refused)
    assert tokenizer.decode(words & IDS) == "09 Mar 2025 00:00 <user>a<assistant>b<|endoftext|>"
    assert not recipe(tokenizer).asks_day


def test_template_that_is_none_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="the chat template cannot be read"):
        recipe(tokenizer, "{% for %}").make()


def test_row_that_the_template_refuses_is_dropped_with_its_words(tokenizer: Any) -> None:
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}" + TAGGED
    )
    assert refusal(tokenizer, chat(("assistant", "b")), template) == (
        "the chat template refuses it (begin with a user)"
    )


def test_no_text_is_taken_for_the_template_s(tokenizer: Any) -> None:
    """Neither noncharacters nor words of the template move what is trained on."""
    forged = "x\ufdd0r0:0\ufdd1y<assistant>z<|endoftext|>"
    asked, answered = Message(role="user", content=forged), Message(role="assistant", content=forged)
    example = ChatExample(source=WHERE, messages=(asked, answered))
    assert shown(tokenizer, example, THINKS) == f"<user>{forged}[]<assistant>[[{forged}[]<|endoftext|>]]"


def test_chats_without_a_template_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template; set data\.chat_template"):
        recipe(tokenizer, None).make().encode([chat(("user", "a"), ("assistant", "b"))])


# -- other examples --------------------------------------------------------------------------------------


def test_completion_is_trained_on_and_its_prompt_with_all(tokenizer: Any) -> None:
    example = CompletionExample(source=WHERE, prompt="hello", completion=" world")
    assert shown(tokenizer, example) == "hello[[ world<|endoftext|>]]"
    assert shown(tokenizer, example, everything=True).replace("]]", "").replace("[[", "") == (
        "hello world<|endoftext|>"
    )
    words = encoded(tokenizer, example, everything=True)
    assert words[0] & START
    assert not words[0] & TRAINED
    assert (words[1:] & TRAINED).all()


def test_text_is_trained_on_but_for_its_first_token(tokenizer: Any) -> None:
    words = encoded(tokenizer, TextExample(source=WHERE, text="hello world"))
    assert words[-1] & IDS == tokenizer.eos_token_id
    assert ((words & TRAINED) != 0).tolist() == [False, *[True] * (len(words) - 1)]


def test_tokens_keep_their_labels(tokenizer: Any) -> None:
    words = encoded(tokenizer, TokensExample(source=WHERE, input_ids=(5, 6, 7), labels=(-100, -100, 7)))
    assert (words & IDS).tolist() == [5, 6, 7]
    assert ((words & TRAINED) != 0).tolist() == [False, False, True]
    for ids, labels, reason in [
        ((5, 6), (5,), "2 input_ids and 1 labels"),
        ((5, 6), (5, 9), "a label differs from its token"),
        ((5, -6), None, "input_ids must be whole numbers from 0"),
        ((), None, "input_ids must be whole numbers from 0"),
    ]:
        assert reason in refusal(tokenizer, TokensExample(source=WHERE, input_ids=ids, labels=labels))


KTO = KtoExample(source=WHERE, prompt="hello", completion=" world", is_good=True)
PAIR = PreferenceExample(
    source=WHERE,
    prompt=(Message(role="user", content="a"),),
    chosen=(Message(role="assistant", content="good"),),
    rejected=(Message(role="assistant", content="bad"),),
)


def test_pairs_are_encoded_as_prompt_and_answers(tokenizer: Any) -> None:
    def decoded(judged: Judged) -> list[str]:
        return [tokenizer.decode(part) for part in (judged.prompts[0], *judged.answers)]

    pair = recipe(tokenizer).make().encode_pair(PAIR)
    assert decoded(pair) == ["<user>a<assistant>", "good<|endoftext|>", "bad<|endoftext|>"]
    one = recipe(tokenizer, None).make().encode_pair(KTO)
    assert decoded(one) == ["hello", " world<|endoftext|>"]
    assert (pair.is_good, one.is_good) == (False, True)


@needs_tokenizers
@pytest.mark.parametrize("name", ["llama3.1", "qwen2.5"])
def test_pairs_of_text_are_split_as_trl_splits_them(name: str) -> None:
    """Where the prompt's last tokens join with what follows, the answers begin before them."""
    trl = pytest.importorskip("trl.data_utils")
    tokenizer = published(name)
    encoder = replace(recipe(tokenizer, None), objective=OBJECTIVES["dpo"]).make()
    answers = ["Yes", " yes", "\n\nYes", "1", "  ok", "...", "\u00e9t\u00e9", ":no", "\nlist", " (a)"]
    num_joined = 0
    for prompt in ("Q: why?\nA:", "Q: why?\nA: ", "Answer:\n", "Say"):
        for chosen in answers:
            for rejected in answers:
                pair = PreferenceExample(source=WHERE, prompt=prompt, chosen=chosen, rejected=rejected)
                asked, good, bad = (
                    tokenizer(text)["input_ids"] for text in (prompt, prompt + chosen, prompt + rejected)
                )
                shared = min(trl.common_prefix_length(asked, whole) for whole in (good, bad))
                num_joined += shared < len(asked)
                judged = encoder.encode_pair(pair)
                end = [tokenizer.eos_token_id]
                assert judged.prompts == (good[:shared], bad[:shared])
                assert judged.answers == (good[shared:] + end, bad[shared:] + end)
    assert num_joined > 50


def test_conversations_with_other_system_prompts_keep_them(tokenizer: Any) -> None:
    def said(system: str, answer: str) -> tuple[Message, ...]:
        turns = (("system", system), ("user", "a"), ("assistant", answer))
        return tuple(Message(role=role, content=text) for role, text in turns)

    pair = PreferenceExample(source=WHERE, prompt=(), chosen=said("x", "good"), rejected=said("y", "bad"))
    judged = replace(recipe(tokenizer), objective=OBJECTIVES["dpo"]).make().encode_pair(pair)
    assert [tokenizer.decode(ids) for ids in judged.prompts] == [
        f"<system>{system}<user>a<assistant>" for system in "xy"
    ]
    assert [tokenizer.decode(ids) for ids in judged.answers] == ["good<|endoftext|>", "bad<|endoftext|>"]
    shown = "".join(f"[[{text}]]" if is_trained else text for text, is_trained in judged.show(tokenizer))
    assert shown == (
        "\n<chosen> <system>x<user>a<assistant>[[good<|endoftext|>]]"
        "\n<rejected> <system>y<user>a<assistant>[[bad<|endoftext|>]]"
    )


@needs_tokenizers
def test_a_beginning_that_the_text_has_is_not_put_before_it_again() -> None:
    tokenizer = published("llama3.1")
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    (plain,) = recipe(tokenizer, None).make().encode([TextExample(source=WHERE, text="hello world")])
    assert not isinstance(plain, Refused)
    ids = (plain & IDS).tolist()
    assert (ids[0], ids[-1], ids.count(bos)) == (bos, end, 1)
    for example in (
        TextExample(source=WHERE, text=tokenizer.bos_token + "hello world"),
        CompletionExample(source=WHERE, prompt=tokenizer.bos_token + "hello", completion=" world"),
    ):
        words = encoded(tokenizer, example)
        assert (words & IDS).tolist() == ids
        assert (words[-1] & TRAINED) > 0
    assert ((words & TRAINED) != 0).tolist() == [False, False, True, True]
    assert (encoded(tokenizer, TextExample(source=WHERE, text=tokenizer.bos_token * 2)) & IDS).tolist() == [
        *([bos] * 2),
        end,
    ]


@pytest.mark.parametrize(
    ("loss", "example", "said"),
    [
        (
            "sft",
            PAIR,
            "holds preference pairs, but train.loss is sft.* as if they were good; use train.loss=dpo",
        ),
        ("sft", KTO, r"holds answers marked good .*, but train.loss is sft.*; use train.loss=kto"),
        ("kto", PAIR, "holds preference pairs, but train.loss is kto; use train.loss=dpo"),
        (
            "dpo",
            TextExample(source=WHERE, text="a"),
            "holds .* nobody has judged, but train.loss is dpo; use train.loss=sft",
        ),
    ],
)
def test_examples_are_refused_by_a_loss_that_is_not_theirs(
    tokenizer: Any, loss: str, example: Any, said: str
) -> None:
    some = replace(recipe(tokenizer), objective=OBJECTIVES[loss])
    with pytest.raises(DataError, match=rf"chats\.jsonl:7: the data {said}"):
        list(encode_all([example], some, 1))
