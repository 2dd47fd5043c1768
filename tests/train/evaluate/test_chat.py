"""A conversation: the tokens that the model is given, where it stops, and what is shown."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from megatrain.cli import main
from megatrain.data.templates import named_template
from megatrain.data.tokenizer import add_tokens, train_tokenizer
from megatrain.errors import ConfigError
from megatrain.train.evaluate.chat import Chat, converse, stop_ids
from megatrain.train.evaluate.prompts import continue_text

WORDS = ["Hello", "world", "again", "more"]


@cache
def made() -> PreTrainedTokenizerFast:
    """Make a tokenizer in which ChatML's words are one token each."""
    tokenizer = train_tokenizer([" ".join(WORDS) * 9], 300)
    add_tokens(tokenizer, ["<|im_start|>", "<|im_end|>", "<|stop|>"])
    return tokenizer


class Scripted(LlamaForCausalLM):
    """Says what it is told to, whatever it is asked, and takes note of that."""

    def __init__(self, *, script: str = "", end: str = "", eos: Any = None, context: int = 400) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
        super().__init__(LlamaConfig(vocab_size=310, max_position_embeddings=context, **sizes))
        self.generation_config.eos_token_id = eos
        self.script: list[int] = made()(script + end + "more more more")["input_ids"]
        self.asked: list[list[int]] = []
        self._said = 0

    def generate(self, inputs: torch.Tensor | None = None, **options: Any) -> Any:
        given = options["input_ids"] if inputs is None else inputs
        self.asked.append(given[0].tolist())
        self._said = 0
        return super().generate(inputs, **options)

    def forward(self, input_ids: torch.Tensor, **options: Any) -> CausalLMOutputWithPast:
        logits = torch.zeros(1, input_ids.shape[1], 310)
        logits[:, :, self.script[self._said % len(self.script)]] = 9.0
        self._said += 1
        return CausalLMOutputWithPast(logits=logits)


def id_of(token: str) -> int:
    return int(made().convert_tokens_to_ids(token))


def test_the_model_gets_the_tokens_of_apply_chat_template() -> None:
    tokenizer, model = made(), Scripted(script="Hello world", end="<|im_end|>")
    chat = Chat(model, tokenizer, template="chatml", system="Be brief.")
    turns: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for question in ("Hello?", "again \n"):
        turns.append({"role": "user", "content": question})
        assert chat.ask(question) == "Hello world"
        expected: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert model.asked[-1] == expected
        turns.append({"role": "assistant", "content": "Hello world"})
    assert chat.messages == turns
    chat.forget()
    chat.ask("more")
    assert model.asked[-1] == tokenizer.apply_chat_template(
        [turns[0], {"role": "user", "content": "more"}], add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|im_end|>", "<|stop|>"])
def test_it_stops_at_each_token_that_ends_a_turn(end: str) -> None:
    """Of the tokenizer, of the template, and of the generation configuration."""
    model = Scripted(script="Hello world", end=end, eos=[id_of("<|stop|>"), id_of("<|endoftext|>")])
    chat = Chat(model, made(), template="chatml", max_new_tokens=30)
    assert chat.stop_ids == sorted(map(id_of, ("<|endoftext|>", "<|im_end|>", "<|stop|>")))
    pieces: list[str] = []
    assert chat.ask("Hello?", pieces.append) == "Hello world" == "".join(pieces)


def test_end_of_a_turn_by_template() -> None:
    tokenizer, model = made(), Scripted()
    for template, ends in {
        named_template("plain"): ["<|endoftext|>"],
        "{% for m in messages %}{{ m.content }}\n<|stop|>{{ eos_token }}{% endfor %}": ["<|stop|>"],
        "{% for m in messages %}{{ m.content }} END <|stop|>{% endfor %}": [],
        "{% for m in messages %}{{ m.content }}{% endfor %}": [],
    }.items():
        tokenizer.chat_template = template
        assert stop_ids(model, tokenizer) == sorted({id_of(end) for end in [*ends, "<|endoftext|>"]})


def test_what_cannot_be_a_conversation_is_one_sentence() -> None:
    tokenizer = made()
    tokenizer.chat_template = None
    with pytest.raises(
        ConfigError, match=r"no chat template.*--chat-template takes a file, or a name: alpaca"
    ):
        Chat(Scripted(), tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no turns') }}"
    with pytest.raises(ConfigError, match="refuses plain turns: no turns"):
        Chat(Scripted(), tokenizer)
    small = Chat(Scripted(script="Hello", context=40), tokenizer, template="chatml")
    assert small.ask("Hello").count("more") < 30, "the answer ends with the context"
    with pytest.raises(ConfigError, match=r"has \d+ tokens, and the model takes 40"):
        small.ask("again")
    strict = Chat(Scripted(), tokenizer, template="gemma", system="One")
    strict.messages.append({"role": "system", "content": "Two"})
    with pytest.raises(ConfigError, match="refuses the conversation: a system message comes first"):
        strict.ask("Hello")


def test_a_turn_that_is_no_text_is_said_and_the_conversation_goes_on() -> None:
    model = Scripted(script="Hello", end="<|im_end|>")
    lines = iter([b"a\xffb".decode(errors="surrogateescape"), "again", None])
    said: list[str] = []
    converse(Chat(model, made(), template="chatml"), lambda: next(lines), str, said.append)
    assert said == ["what was asked is not UTF-8 text; ask again"]
    assert len(model.asked) == 1


def test_a_text_is_continued_within_the_context() -> None:
    """And one that has no room there is a sentence, not words that the model was never trained to read."""
    tokenizer, model = made(), Scripted(script="Hello", context=20)
    whole = continue_text(model, tokenizer, "Hello", max_new_tokens=100_000)
    assert len(model.asked[0]) + model._said == 20
    assert whole.startswith("Hello")
    with pytest.raises(
        ConfigError, match=r"the prompt has \d+ tokens, and the model takes 20, so there is no"
    ):
        continue_text(model, tokenizer, "again " * 20, max_new_tokens=1)


def test_lines_are_turns_and_commands() -> None:
    model = Scripted(script="Hello world", end="<|im_end|>", context=60)
    chat = Chat(model, made(), template="chatml")
    lines = iter(["Hello\n", "\n", "/clear\n", "again\n", "more " * 50, "world", "/exit\n", "never"])
    shown: list[str] = []
    said: list[str] = []
    converse(chat, lambda: next(lines), shown.append, said.append)
    assert "".join(shown) == "Hello world\nHello world\n\nHello world\n"
    assert said[0] == "the conversation begins anew"
    assert "the model takes 60" in said[1]
    assert [len(asked) for asked in model.asked] == sorted(len(asked) for asked in model.asked)
    assert next(lines) == "never"


def test_ctrl_c_ends_an_answer_and_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(Scripted(script="Hello", end="<|im_end|>"), made(), template="chatml")
    lines = iter(["Hello", "again", None])
    show: list[str] = []

    def interrupted(text: str) -> None:
        show.append(text)
        if len(show) == 1:
            raise KeyboardInterrupt

    converse(chat, lambda: next(lines), interrupted, lambda text: None)
    assert [turn["content"] for turn in chat.messages] == ["again", "Hello"]


def test_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real model of a directory: what is asked is piped in, and answers alone come out."""
    tokenizer = made()
    tokenizer.chat_template = named_template("chatml")
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=310, **sizes)).save_pretrained(tmp_path)

    def output(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        assert not ended.value.code
        return capsys.readouterr().out

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/clear\nHello"))
    talked = output("chat", str(tmp_path), "--max-new-tokens", "5").splitlines()
    assert len(talked) % 2 == 0
    half = len(talked) // 2
    assert talked[:half] == talked[half:] != [""] * half
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nHello\n"), "utf-8"))
    again = output("chat", str(tmp_path), "--max-new-tokens", "5").splitlines()
    assert again == ["", *talked[:half]], "a line that is no text has no answer"
    sampled = output("sample", str(tmp_path), "--prompt", "Hello", "--chat", "--max-new-tokens", "5")
    assert sampled.strip() == "\n".join(talked[:half]).strip()
