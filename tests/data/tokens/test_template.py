"""What is trained on of a template's text, on templates written for what is hard to tell about one."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from megatrain.data.example import Message
from megatrain.data.tokens.rendering import RenderError
from megatrain.data.tokens.template import ChatTemplate, TrainOn
from megatrain.errors import ConfigError

USER, MODEL = {"role": "user"}, {"role": "assistant"}
TURN = "<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}"
"""A turn of the message `m`."""
ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
CHAT = "<user>a<assistant>[[b<end>]]<user>c<assistant>[[d<end>]]"


def turns(*said: str) -> list[Message]:
    """Make turns of user and assistant, in turn."""
    return [
        Message(role="assistant" if number % 2 else "user", content=content)
        for number, content in enumerate(said)
    ]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, date(2026, 11, 23))


def shown(source: str, messages: list[Message], tools: Any = (), **more: Any) -> str:
    """Render, with what is trained on in double brackets."""
    train_on = more.pop("train_on", TrainOn())
    text, spans = template_of(source).spans(messages, tools, train_on, **more)
    shown, place = "", 0
    for start, end in spans:
        shown, place = f"{shown}{text[place:start]}[[{text[start:end]}]]", end
    return shown + text[place:]


ONE_CHAT = {
    "a loop over messages": "{% for m in messages %}" + TURN + "{% endfor %}",
    "a loop over their places": (
        "{% for i in range(messages|length) %}{% set m = messages[i] %}" + TURN + "{% endfor %}"
    ),
    "a loop over pairs": (
        "{% for one in messages %}{% for n, m in [(1, one)] %}" + TURN + "{% endfor %}{% endfor %}"
    ),
    "loops in a loop": "{% for some in messages | batch(3) %}{% for m in some %}"
    + TURN
    + "{% endfor %}{% endfor %}",
    "another message is looked up": (
        "{% for m in messages %}{% set before = messages[loop.index0 - 1] %}"
        "{% for other in messages %}{% set last = other.content %}{% endfor %}" + TURN + "{% endfor %}"
    ),
    "a captured turn": (
        "{% for m in messages %}{% set turn %}{% for word in [m.content] %}{{ word }}{% endfor %}{% endset %}"
        "<{{ m.role }}>{% if turn | length < 9 and turn | trim %}{{ turn }}{% else %}no{% endif %}"
        "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    ),
    "a captured conversation": (
        "{% set all %}{% for m in messages %}"
        + TURN
        + "{% endfor %}{% endset %}{{ all | replace('  ', ' ') }}"
    ),
    "a macro of a turn": (
        "{% macro turn(m) %}" + TURN + "{% endmacro %}{% for m in messages %}{{ turn(m) | trim }}{% endfor %}"
    ),
    "a macro of the conversation": (
        "{% macro all(some) %}{% for m in some %}" + TURN + "{% endfor %}{% endmacro %}{{ all(messages) }}"
    ),
    "a filtered turn": ("{% for m in messages %}{% filter trim %} " + TURN + " {% endfilter %}{% endfor %}"),
    "operators": (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}"
        "{{ ['<e', 'nd>'] | join if loop.index0 % 2 }}{% endfor %}"
    ),
    "what leaves no trace": (
        "{% for m in messages %}{{ '<%s>' % m.role }}{{ m.content | reverse | reverse }}"
        "{% if m.role == 'assistant' %}{{ '<{}>'.format('end') }}{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("case", ONE_CHAT)
def test_a_turn_is_what_is_written_for_its_message(case: str) -> None:
    source = ONE_CHAT[case]
    assert shown(source + ASK, turns("a", "b", "c", "d")) == CHAT
    if case == "what leaves no trace":
        with pytest.raises(RenderError, match="does not tell where an answer begins"):
            shown(source, turns("a", "b", "c", "d"))
    else:
        assert shown(source, turns("a", "b", "c", "d")) == CHAT  # nothing tells how a prompt ends


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (  # the beginning is a piece of its own, before a loop
            "{% for m in messages %}<{{ m.role }}>{% for part in [m.content] %}{{ part }}{% endfor %}<end>"
            "{% endfor %}" + ASK,
            "<user>a<end><assistant>[[b<end>]]<user>c<end><assistant>[[d<end>]]",
        ),
        (  # the text ends with a token where nothing is asked, and the end is that of the last turn
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}",
            "<|user|>a<end><|assistant|>[[b<end>]]<|user|>c<end><|assistant|>[[d<end></s>]]",
        ),
        (  # a file with line breaks and indents
            "{% for m in messages %}\n    <{{ m.role }}>\n{{ m.content }}<end>\n{% endfor %}\n"
            "{% if add_generation_prompt %}\n        <assistant>\n{% endif %}",
            "    <user>\na<end>\n    <assistant>\n[[b<end>\n]]"
            "    <user>\nc<end>\n    <assistant>\n[[d<end>\n]]",
        ),
        (  # the beginning counts
            "{% for m in messages %}{{ m.role }} {{ loop.index }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant {{ messages|length + 1 }}: {% endif %}",
            "user 1: a\nassistant 2: [[b\n]]user 3: c\nassistant 4: [[d\n]]",
        ),
        (  # the user's turn ends with it
            "{% for m in messages %}{{ m.content }}{{ '</s>' if loop.index0 % 2 else '\nModel:' }}"
            "{% endfor %}",
            "a\nModel:[[b</s>]]c\nModel:[[d</s>]]",
        ),
        (  # a prompt gives the reasoning's tag; an earlier turn has none, the last one an empty one
            "{% for m in messages %}<{{ m.role }}>{% if loop.last %}<think>\n\n</think>{% endif %}"
            "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}",
            "<user>a<end><assistant>[[b<end>]]<user>c<end><assistant><think>\n[[\n</think>d<end>]]",
        ),
        (  # a space behind the end is a part of what follows
            "{% for m in messages %}"
            "{{ '[' + m.content + '] ' if m.role == 'user' else m.content + '</s> ' }}{% endfor %}",
            "[a] [[b</s>]] [c] [[d</s>]] ",
        ),
        (  # marks of the template's own go before all that
            "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}{% endgeneration %}<end>{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "<user>a<assistant>[[b]]<end><user>c<assistant>[[d]]<end>",
        ),
        (  # also in a macro
            "{% macro said(m) %}{% generation %}{{ m.content }}<end>{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}<{{ m.role }}>"
            "{{ said(m) if m.role == 'assistant' else m.content }}{% endfor %}",
            CHAT,
        ),
    ],
)
def test_what_a_prompt_gives_is_not_trained_on(source: str, expected: str) -> None:
    assert shown(source, turns("a", "b", "c", "d")) == expected


def test_words_of_a_template_in_a_message_move_nothing() -> None:
    source = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
    forged = "<assistant>x<end><user>"
    expected = f"<user>{forged}<assistant>[[{forged}<end>]]"
    assert shown(source, turns(forged, forged)) == expected


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefgh1", "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [
    Message(role="user", content="a"),
    Message(role="assistant", content="b", tool_calls=(called("find", what="c"),)),
    Message(role="tool", content="secret", name="find", tool_call_id="abcdefgh1"),
    Message(role="assistant", content="d"),
]


def test_a_tool_s_answer_in_a_turn_of_the_assistant_s_is_not_trained_on() -> None:
    """As Gemma 4 writes it, with words around it; the turn goes on without another beginning."""
    source = (
        "{% for m in messages %}{% if m.role != 'tool' %}"
        "{% if not (loop.index0 and messages[loop.index0 - 1].role == 'tool') %}<{{ m.role }}>{% endif %}"
        "{{ m.content }}{% for call in m.tool_calls %}<call>{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}</call>{% endfor %}"
        "{% if m.tool_calls %}{% for k in range(loop.index0 + 1, messages|length) %}"
        "{% if messages[k].role == 'tool' %}{% set answer = messages[k] %}"
        "<got>{{ answer.content }}</got>{% endif %}{% endfor %}{% endif %}"
        "{% if not m.tool_calls %}<end>{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>{% endif %}"
    )
    assert shown(source, CALLS, TOOLS) == (
        '<user>a<end><assistant>[[b<call>find{"what": "c"}</call>]]<got>secret</got>[[d<end>]]'
    )
    tool_too = TrainOn(roles=("assistant", "tool"))
    assert shown(source, CALLS, TOOLS, train_on=tool_too) == (
        '<user>a<end><assistant>[[b<call>find{"what": "c"}</call>]]<got>[[secret</got>]][[d<end>]]'
    )


def test_ids_of_calls_reach_the_template() -> None:
    """Mistral's refuses a call without one."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}"
        "{% if call.id | default('') | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
        "{{ call.function.name }}#{{ call.id }}{% endfor %}{{ m.tool_call_id }}<end>{% endfor %}" + ASK
    )
    assert shown(source, CALLS, TOOLS) == (
        "<user>a<end><assistant>[[bfind#abcdefgh1<end>]]<tool>secretabcdefgh1<end><assistant>[[d<end>]]"
    )


def test_other_keys_and_variables_reach_the_template() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.plan }}{{ m.content }}{{ shout }}<end>{% endfor %}" + ASK
    )
    messages = [*turns("a"), Message(role="assistant", content="b", more={"plan": "p"})]
    assert shown(source, messages, options={"shout": "!"}) == "<user>a!<end><assistant>[[pb!<end>]]"


PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content %}{{ p['text'] }}|{% endfor %}<end>{% endfor %}"
)


def test_content_is_given_in_the_form_that_the_template_takes() -> None:
    two = Message(role="assistant", content="bc", parts=("b", "c"))
    assert shown(PARTS + ASK, [*turns("a"), two]) == "<user>a|<end><assistant>[[b|c|<end>]]"
    text = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
    assert shown(text, [*turns("a"), two]) == "<user>a<assistant>[[bc<end>]]"
    both = PARTS.replace("{% for p", "{% if m.content is string %}{{ m.content }}{% else %}{% for p").replace(
        "{% endfor %}<end>", "{% endfor %}{% endif %}<end>"
    )
    assert shown(both + ASK, [*turns("a"), two]) == "<user>a<end><assistant>[[b|c|<end>]]"


def test_arguments_are_given_as_the_template_takes_them() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}<end>{% endfor %}" + ASK
    )
    assert '[[bfind{"what": "c"}<end>]]' in shown(source, CALLS, TOOLS)


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for m in messages %}<{{ m.role }}>"
            "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}" + ASK,
            "leaves out what the assistant says",
        ),
        (  # a turn writes what the next one says
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
            "{{ (messages[loop.index] or {}).content }}{% endfor %}" + ASK,
            "words of a message where they are not known to be its own",
        ),
        (
            "{% for m in messages %}<bot>{{ m.content }}{% endfor %}" + ASK,
            "begins a turn of the assistant's with '<bot>' and a prompt for it with '<assistant>'",
        ),
        (
            "{{ messages | map(attribute='content') | join }}",
            "writes nothing that is known to be of the assistant",
        ),
    ],
)
def test_a_template_that_cannot_be_told_apart_is_refused_by_name(source: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        template_of(source).check()
    assert reason in str(caught.value)
    for way_out in ("{% generation %}", "data.chat_template", "data.train_on=all"):
        assert way_out in str(caught.value)
    text, spans = template_of(source).spans(turns("a", "b"), (), TrainOn(everything=True))
    assert spans == [(0, len(text))]


def test_an_answer_of_which_nothing_is_the_model_s_is_refused() -> None:
    """A call outside of the marks, or a turn of no words in a template without an end."""
    calls_outside = (
        "{% for m in messages %}<{{ m.role }}>{{ m.tool_calls }}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    asked = turns("a")
    calls = [*asked, Message(role="assistant", content="", tool_calls=(called("find"),))]
    empty = [*asked, Message(role="assistant", content="")]
    no_end = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + ASK
    for source, messages in ((calls_outside, calls), (no_end, empty)):
        with pytest.raises(RenderError, match="writes nothing that the model says"):
            template_of(source).answer(messages, (), num_prompt=1)


def test_a_prompt_of_turns_is_trained_on_with_everything_else() -> None:
    source = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
    asked = turns("a", "b", "c", "d")
    assert shown(source, asked, num_prompt=3) == "<user>a<assistant>b<end><user>c<assistant>[[d<end>]]"
    everything = TrainOn(everything=True)
    assert (
        shown(source, asked, num_prompt=3, train_on=everything)
        == f"[[{CHAT.replace('[[', '').replace(']]', '')}]]"
    )
