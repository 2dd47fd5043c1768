"""Masks of every chat template that TRL ships, held against three oracles that share no code with ours.

The text and the ids are those of the tokenizer's own `apply_chat_template`. What is trained on is, first,
what a regular expression written by hand for each format says; second, words that occur once: those of the
assistant are in, and all others are out; and third, in the full product, what TRL's training template of it
marks, where that writes the same text. What differs on purpose is named here and in docs/data.md.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from datetime import date
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megatrain.data.example import ChatExample, Source
from megatrain.data.flagged_tokens import IDS
from megatrain.data.formats.detect import Converter, Recipe
from megatrain.data.tokenizer import train_tokenizer
from megatrain.data.tokens.encode import Encoder, EncoderRecipe, Refused
from megatrain.data.tokens.rendering import RenderError, Span
from megatrain.data.tokens.template import ChatTemplate, TrainOn

trl = pytest.importorskip("trl")
FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))


# -- conversations, each word of which occurs once -------------------------------------------------------


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def model(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calls(*words: str) -> list[dict[str, Any]]:
    """Calls of a tool with a word each."""
    return [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": "lookup", "arguments": {"word": word}},
        }
        for number, word in enumerate(words)
    ]


def tool(content: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": "lookup", "tool_call_id": f"call0000{number}", "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "Which."}},
            "required": ["word"],
        },
    },
}
MARKERS = (
    "<|im_end|>\n<|im_start|>assistant\n <|end|><|assistant|> <turn|><|turn>model <|eot_id|> </s> [/INST] "
    "<end_of_turn> <start_of_turn>model <|eot|><|start|>assistant<|message|> \ufdd0\ufdd1 \U0001f600 e\u0301"
)
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "system prompt": [system("SYSTEM0"), user("USER1"), model("MODEL2")],
    "several turns": [user("USER0"), model("MODEL1"), user("USER2\nUSER3"), model(" MODEL4 MODEL5\n\n")],
    "call": [user("USER0"), model("", tool_calls=calls("MODEL1")), tool("TOOL2"), model("MODEL3")],
    "words and a call": [
        user("USER0"),
        model("MODEL1", tool_calls=calls("MODEL2")),
        tool("TOOL3"),
        model("MODEL4"),
        user("USER5"),
        model("MODEL6"),
    ],
    "two calls at once": [
        user("USER0"),
        model("", tool_calls=calls("MODEL1", "MODEL2")),
        tool("TOOL3"),
        tool("TOOL4", 1),
        model("MODEL5"),
    ],
    "call at the end": [user("USER0"), model("", tool_calls=calls("MODEL1"))],
    "reasoning": [
        user("USER0"),
        model("MODEL1", reasoning_content="MODEL2"),
        user("USER3"),
        model("MODEL4", reasoning_content="MODEL5"),
    ],
    "reasoning in the content": [user("USER0"), model("<think>\nMODEL1\n</think>\n\nMODEL2")],
    "reasoning and a call": [
        user("USER0"),
        model("", reasoning_content="MODEL1", tool_calls=calls("MODEL2")),
        tool("TOOL3"),
        model("MODEL4", reasoning_content="MODEL5"),
    ],
    "empty answer": [user("USER0"), model(""), user("USER1"), model("MODEL2")],
    "typed parts": [
        system(parts("SYSTEM0", "SYSTEM1")),
        user(parts("USER2", "USER3")),
        model(parts("MODEL4", "MODEL5")),
    ],
    "the template's own markers": [user(f"USER0 {MARKERS} USER1"), model(f"MODEL2 {MARKERS} MODEL3")],
    "the assistant begins": [model("MODEL0"), user("USER1"), model("MODEL2")],
    "the assistant goes on": [user("USER0"), model("MODEL1"), model("MODEL2")],
}
MARKED = "the template's own markers"

# -- the first oracle: formats by hand -------------------------------------------------------------------

CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)"
GIVEN_THINK = r"<\|im_start\|>assistant\n(?:<think>\n|<think>(?=</think>))?(.*?<\|im_end\|>\n)"
GEMMA = r"<start_of_turn>model\n(.*?<end_of_turn>\n)"
GEMMA_4 = r"<\|turn>model\n(.*?)(?=<\|turn>|\Z)"
LLAMA_3 = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"
DEEPSEEK = "(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>)(.*?<｜end▁of▁sentence｜>)"  # noqa: RUF001
IDEFICS = r"Assistant:(.*?<end_of_utterance>\n)"
PHI = r"<\|assistant\|>\n(.*?<\|end\|>\n(?:</s>\Z)?)"
ANALYSIS = r"(?:<\|channel\|>analysis.*?<\|end\|><\|start\|>assistant)?"

TRAINED = {
    "cohere": r"<\|CHATBOT_TOKEN\|>(.*?<\|END_OF_TURN_TOKEN\|>)",
    "cohere2": r"<\|CHATBOT_TOKEN\|><\|START_RESPONSE\|>(.*?<\|END_OF_TURN_TOKEN\|>)",
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "diffusion_gemma": GEMMA_4,
    "gemma": GEMMA,
    "gemma3": GEMMA,
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), GEMMA_4),
    "glm4moe": r"<\|assistant\|>(\n.*?)(?=<\|user\|>|<\|observation\|>|<\|assistant\|>|\Z)",
    "gptoss": rf"<\|start\|>assistant({ANALYSIS}.*?(?:<\|return\|>|<\|call\|>|<\|end\|>))",
    "idefics3": IDEFICS,
    **dict.fromkeys(("lfm2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"), CHATML),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), LLAMA_3),
    "llava_next": r"(?:\[/INST\]|(?<=</s>) |\A)( .*?</s>)",
    "muse_glimmer": r"<\|start\|>assistant( to=.*?<\|eot\|>)",
    **dict.fromkeys(
        ("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"), GIVEN_THINK
    ),
    "phi3": PHI,
    "phi3_5": PHI,
    # The line break is the template's, and the prompt gives it; TRL trains on it, and masks agree.
    "qwen2_5": r"<\|im_start\|>assistant(\n.*?<\|im_end\|>\n)",
    "qwen2_5_vl": CHATML,
    "qwen3": CHATML,
    "qwen3_5_nothink": GIVEN_THINK.replace("(?:", r"(?:<think>\n\n</think>\n\n|"),
    **dict.fromkeys(("qwen3_5_think", "qwen3_6", "qwen3_8"), GIVEN_THINK),
    "qwen3_instruct_2507": CHATML,
    "qwen3_vl": CHATML,
    "smolvlm": IDEFICS,
}
NOT_THE_MODEL_S = re.compile(r"<\|tool_response>response:.*?<tool_response\|>", re.DOTALL)
"""What Gemma 4 writes of a tool's answer into a turn of the assistant's."""

# -- the second oracle: TRL's training templates ---------------------------------------------------------

TRL_TRAINS_TOO = {
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), "<｜Assistant｜>|<｜tool▁outputs▁end｜>"),  # noqa: RUF001
    **dict.fromkeys(("gptoss", "muse_glimmer"), r"<\|start\|>assistant"),
    "glm4moe": r"<\|user\|>|<\|observation\|>",
    **dict.fromkeys(
        (
            *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
            *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
        ),
        r"<think>\n?(?:\n</think>\n\n)?",
    ),
}
"""What a prompt gives of a turn and TRL trains on: headers of turns, and a tag that opens the reasoning. Of
GLM, whose turns have no end of their own, the beginning of the next one."""
TRL_LEAVES_OUT = {"diffusion_gemma": r"<\|tool_response>"}
"""What ends a turn that calls, if it is the last."""

# -- what is refused -------------------------------------------------------------------------------------

WITH_CALLS = ("call", "words and a call", "two calls at once", "call at the end", "reasoning and a call")
LEAVES_OUT_CALLS = (
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3"),
    *("llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
)
LEAVES_OUT_WORDS = ("gptoss", "llama3_1", "llama3_2", "muse_glimmer")

TYPED_PARTS_ONLY = ("idefics3", "llava_next", "smolvlm")
JSON_ARGUMENTS = ("deepseekv3",)
TAKE_PARTS = {
    *("diffusion_gemma", "gemma3", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe"),
    *("lfm2_2_5_vl", "muse_glimmer", "qwen2_5_vl", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
    *("qwen3_vl", *TYPED_PARTS_ONLY),
}
SYSTEM_AS_TEXT = ("gemma4_v2", "gemma4_v3")
"""They write a system prompt of typed parts as Python prints a list; it is given as text."""


@cache
def tokenizer() -> Any:
    made = train_tokenizer(["USER0 MODEL1 TOOL2 SYSTEM3 <|im_start|>assistant\n"] * 9, 300)
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return made


def as_given(name: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns as this template takes them."""
    found = []
    for turn in turns:
        turn = json.loads(json.dumps(turn))
        content = turn["content"]
        if isinstance(content, str) and name in TYPED_PARTS_ONLY:
            turn["content"] = parts(content)
        elif isinstance(content, list) and (
            name not in TAKE_PARTS or (turn["role"] == "system" and name in SYSTEM_AS_TEXT)
        ):
            turn["content"] = "".join(part["text"] for part in content)
        if "reasoning_content" in turn:
            turn["thinking"] = turn["reasoning_content"]
        for call in turn.get("tool_calls", ()):
            if name in JSON_ARGUMENTS:
                arguments = call["function"]["arguments"]
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        found.append(turn)
    return found


def tools_of(turns: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    return [LOOKUP] if any("tool_calls" in turn for turn in turns) else None


def applied(name: str, turns: list[dict[str, Any]], **more: Any) -> Any:
    """Return what the tokenizer's own `apply_chat_template` says; None: it refuses."""
    try:
        return tokenizer().apply_chat_template(as_given(name, turns), tools=tools_of(turns), **more)
    except Exception:
        return None


def chars(spans: Any) -> set[int]:
    return {place for start, end in spans for place in range(start, end)}


def by_hand(name: str, conversation: str, text: str) -> set[int]:
    """Return the characters that the format's regular expression trains on."""
    # What a message says is the model's own, also a tag that the prompt would give.
    is_said = conversation == "reasoning in the content" and name.startswith("nemotron")
    regex = CHATML if is_said else TRAINED[name]
    found = chars(match.span(1) for match in re.finditer(regex, text, re.DOTALL))
    return found - chars(match.span() for match in NOT_THE_MODEL_S.finditer(text))


def by_trl(name: str, turns: list[dict[str, Any]], text: str) -> set[int] | None:
    """Return the characters that TRL's training template marks; None: it writes another text, or refuses."""
    path = FOLDER / f"{name}_training.jinja"
    try:
        (written,), (spans,) = render_jinja_template(
            [as_given(name, turns)],
            tools=tools_of(turns),
            chat_template=path.read_text() if path.exists() else "",
            return_assistant_tokens_mask=path.exists(),
            **tokenizer().special_tokens_map,
        )
    except Exception:
        return None
    return chars(spans) if written == text else None


def reason_of(name: str, conversation: str) -> str | None:
    """Return why we refuse what the template renders; None: we do not."""
    if conversation == "words and a call" and name in LEAVES_OUT_WORDS:
        return "leaves out what the assistant says beside a call"
    if conversation in WITH_CALLS and name in LEAVES_OUT_CALLS:
        return "leaves out a call of a tool"
    if conversation == "two calls at once" and name == "gptoss":
        return "leaves out a call of a tool"
    return None


def example_of(turns: list[dict[str, Any]]) -> ChatExample:
    row: Mapping[str, Any] = {"messages": turns, "tools": tools_of(turns)}
    (example,) = Converter(Recipe(format="messages")).examples(row, Source(file="a.jsonl", row=1))
    assert isinstance(example, ChatExample)
    return example


class Watched(ChatTemplate):
    """Keeps what it said last."""

    last: tuple[str, list[Span]]

    def spans(self, *given: Any, **more: Any) -> tuple[str, list[Span]]:
        self.last = super().spans(*given, **more)
        return self.last


def template_of(name: str) -> Watched:
    source = (FOLDER / f"{name}.jinja").read_text()
    return Watched(source, tokenizer().special_tokens_map, date.today())


def check_words(trained: set[int], text: str) -> None:
    """The assistant's words are trained on, and all others are not."""
    for word in re.finditer(r"[A-Z]+\d", text):
        places = chars([word.span()])
        assert places <= trained if word[0].startswith("MODEL") else not places & trained, word


def check_trl(name: str, trained: set[int], theirs: set[int], text: str) -> None:
    """What TRL trains on is what we do, but for what is named above."""
    for more, less, known in (
        (theirs, trained, TRL_TRAINS_TOO.get(name, "")),
        (trained, theirs, TRL_LEAVES_OUT.get(name, "")),
    ):
        differing = "".join(text[place] for place in sorted(more - less))
        assert re.fullmatch(f"(?:{known})*", differing), text


def test_each_template_is_known() -> None:
    assert len(NAMES) == 41
    assert set(TRAINED) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_text_ids_and_masks_of_a_template_that_trl_ships(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    template = template_of(name)
    end_id = tokenizer().eos_token_id
    recipe = EncoderRecipe(tokenizer=tokenizer(), template=source, train_on=TrainOn(), end_id=end_id)
    encoder = Encoder(recipe, template)
    for conversation, turns in CONVERSATIONS.items():
        example = example_of(turns)
        text = applied(name, turns, chat_template=source, tokenize=False)
        reason = "the chat template refuses it" if text is None else reason_of(name, conversation)
        (words,) = encoder.encode([example])
        if reason is not None:
            assert isinstance(words, Refused), conversation
            assert reason in words.reason
            continue
        written, spans = template.last
        assert written == text, conversation
        assert not isinstance(words, Refused)
        ids = applied(name, turns, chat_template=source, return_dict=False)
        assert (words & IDS).tolist() == ids, conversation
        trained = chars(spans)
        check_words(trained, text)
        if conversation != MARKED:
            assert trained == by_hand(name, conversation, text), conversation


AROUND = (
    *("{} ", "  {}", "\n{}", "{}\n\n", "{} <b>", "</think>{}", "<think>\nx\n</think>\n\n{}", "\u00e9 {}"),
    *("{} 'q\"", "[{}]", "{} {{{{x}}}}", "- {}\t"),
)
"""What may stand around a word."""


def drawn(draw: random.Random) -> list[dict[str, Any]]:
    """Make a conversation of any order of turns that data may have, each word of which occurs once."""
    numbers = count()

    def say(who: str) -> str:
        text = f"{who}{next(numbers):03}"
        for _ in range(draw.randrange(3)):
            text = draw.choice(AROUND).format(text)
        return text

    def thinks() -> dict[str, str]:
        return {"reasoning_content": say("MODEL")} if draw.random() < 0.3 else {}

    turns = [system(say("SYSTEM"))] if draw.random() < 0.4 else []
    turns += [model(say("MODEL"))] if draw.random() < 0.1 else []
    has_calls = draw.random() < 0.4
    for _ in range(draw.randrange(1, 4)):
        turns += [user(say("USER")) for _ in range(1 + (draw.random() < 0.1))]
        while has_calls and draw.random() < 0.5:
            made = calls(*(say("MODEL") for _ in range(draw.choice((1, 1, 2)))))
            turns.append(model(draw.choice(("", say("MODEL"))), tool_calls=made, **thinks()))
            turns += [tool(say("TOOL"), number) for number in range(len(made))]
        if draw.random() < 0.93:
            turns.append(model(say("MODEL") if draw.random() < 0.95 else "", **thinks()))
    is_answered = any("MODEL" in turn["content"] or "tool_calls" in turn for turn in turns)
    return turns if is_answered else [*turns, user(say("USER")), model(say("MODEL"))]


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
def test_masks_are_trl_s_in_conversations_drawn_at_random(name: str) -> None:
    """Those above, and 200 more: the text, the words, and TRL's masks. Who refuses, refuses by name."""
    template, source = template_of(name), (FOLDER / f"{name}.jinja").read_text()
    num_compared, num_by_trl, reasons = 0, 0, set()
    more = [drawn(random.Random(f"{name} {number}")) for number in range(200)]
    for turns in (*CONVERSATIONS.values(), *more):
        example = example_of(turns)
        text = applied(name, turns, chat_template=source, tokenize=False)
        try:
            written, spans = template.spans(example.messages, example.tools, TrainOn())
        except RenderError as error:
            reasons.add(re.sub(r"[(;'].*", "", str(error)))
            continue
        assert written == text
        num_compared += 1
        check_words(chars(spans), text)
        theirs = by_trl(name, turns, text)
        if theirs is not None:
            num_by_trl += 1
            check_trl(name, chars(spans), theirs, text)
    known = "refuses it |leaves out|begins a turn of the assistant|writes nothing that is known"
    assert all(re.match(f"the chat template (?:{known})", reason) for reason in reasons), reasons
    assert num_compared > 20
    assert (num_by_trl > 5) == (FOLDER / f"{name}_training.jinja").exists()
