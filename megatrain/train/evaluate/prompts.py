"""Texts continued by a model, for `megatrain sample` and the prompts of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain.errors import ConfigError
from megatrain.model.sequence.range import row_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> str:
    """Return `prompt` and its continuation by the model.

    Args:
        model: The model, in the mode that is wanted.
        tokenizer: The tokenizer of the model.
        prompt: The text to continue.
        max_new_tokens: The largest number of tokens to add; the model's context is a limit too.
        temperature: The temperature; 0 takes the likeliest token each time.

    Raises:
        ConfigError: The prompt has no token, or the model's context has no room for another one.
    """
    import torch

    # verbose=False: a prompt that is too long is reported below
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False, verbose=False)
    count = inputs["input_ids"].numel()
    if count == 0:
        raise ConfigError("the prompt is empty; give --prompt some text")
    context = row_range(model.config).longest
    if context is not None and count >= context:
        raise ConfigError(
            f"the prompt has {count:,} tokens, and the model takes {context:,}, so there is no room to go on;"
            " give a shorter one"
        )
    room = max_new_tokens if context is None else min(max_new_tokens, context - count)
    options: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=room, max_length=None, pad_token_id=pad, **options)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
