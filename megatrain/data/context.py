"""The number of tokens that a row may have, according to the model's configuration."""

from __future__ import annotations

from typing import Any

from megatrain.errors import ConfigError

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def context_length(model_config: Any) -> int | None:
    """Return the context length of a transformers config, or None if it names no limit."""
    text_config = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    lengths = (getattr(text_config, name, None) for name in _CONTEXT_NAMES)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def has_rotary_positions(model_config: Any) -> bool:
    """Return whether a transformers config turns queries and keys by their positions (RoPE).

    Such a model takes rows beyond its context too: from there on its rotations have to be scaled.
    """
    text_config = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    return bool(getattr(text_config, "rope_parameters", None))


def check_seq_len(seq_len: int, context: int | None) -> None:
    """Check that a model takes sequences of `seq_len` tokens.

    Args:
        seq_len: The number of tokens of a row.
        context: The context length, as `context_length` returns it.

    Raises:
        ConfigError: `seq_len` is beyond the model's context.
    """
    if context is not None and seq_len > context:
        raise ConfigError(
            f"data.seq_len {seq_len} is beyond the model's context of {context} tokens; use {context} or less"
        )
