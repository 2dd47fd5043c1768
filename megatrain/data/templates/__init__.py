"""Named chat templates, for models whose tokenizer has none; each is `NAME.jinja` beside this file.

Each is written anew from the format that the models of that name were trained with, and accepts what their
own template accepts: where a tokenizer has one, both write the same text (`tests/data/tokens/test_named.py`).

Sources: the model cards and tokenizers of Llama 2 and 3, Mistral Instruct v0.3, Gemma, Phi-3, Qwen2.5 and
Qwen3; ChatML as of OpenAI; Stanford's Alpaca and LMSYS's Vicuna v1.1.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUFFIX = ".jinja"

SPECIAL_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "qwen2.5": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
}
"""The words of each template that must be one token each."""


@cache
def template_names() -> tuple[str, ...]:
    """Return the names in order."""
    here = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in here if name.endswith(_SUFFIX)))


def named_template(name: str) -> str | None:
    """Return a template as Jinja, or None if there is none of that name."""
    if name not in template_names():
        return None
    return (files(__name__) / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def why_not_suited(name: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the words of a named template for which the tokenizer lacks a token; None if there are none."""
    wanted = SPECIAL_TOKENS.get(name, ())
    there = tokenizer.get_vocab() if wanted else {}
    missing = [token for token in wanted if token not in there]
    if not missing:
        return None
    return (
        f"data.chat_template={name} writes {', '.join(missing)}, for which this tokenizer has no token, so "
        "the model learns and writes them in pieces; let it have them with model.new_tokens="
        f"[{','.join(map(repr, missing))}], or take data.chat_template=plain, which needs none"
    )
