"""Texts continued by a model: `megatrain sample`, and the prompts of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain.errors import ConfigError

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
    """Return `prompt` and what the model makes of it.

    Args:
        model: In the mode that is wanted.
        tokenizer: Its own.
        prompt: Text to continue.
        max_new_tokens: Tokens to add at most.
        temperature: 0 takes the likeliest token each time.

    Raises:
        ConfigError: The prompt has no token.
    """
    import torch

    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].numel() == 0:
        raise ConfigError("the prompt is empty; give --prompt some text")
    options: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad():
        ids = model.generate(
            **inputs, max_new_tokens=max_new_tokens, max_length=None, pad_token_id=pad, **options
        )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
