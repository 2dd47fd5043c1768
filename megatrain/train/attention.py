"""The attention of a run where no setting names one: variable-length attention, or that by tiles."""

from __future__ import annotations

from megatrain.config import Config
from megatrain.config.attention import EITHER_WHERE_ABLE, MOST_TOKENS, TILED_WHERE_ABLE, WHERE_ABLE


def attention_of(config: Config, *, has_varlen: bool, seq_len: int | None = None) -> str | None:
    """Return the attention to ask for; None: what transformers chooses.

    Args:
        config: The settings, in which nothing is open.
        has_varlen: Whether the device has torch's variable-length attention.
        seq_len: The tokens of a row; None: as the settings say.
    """
    if config.model.attn_implementation is not None:
        return config.model.attn_implementation
    is_long = (seq_len or config.data.seq_len) > MOST_TOKENS
    if why_masked(config, has_varlen=has_varlen) is None:
        return EITHER_WHERE_ABLE if is_long else WHERE_ABLE
    return TILED_WHERE_ABLE if is_long else None


def why_masked(config: Config, *, has_varlen: bool) -> str | None:
    """Say what of a run variable-length attention cannot do, whatever the model; None: it can do it.

    Args:
        config: The settings, in which nothing is open.
        has_varlen: Whether the device has torch's variable-length attention.
    """
    if not has_varlen:
        return f"device={config.train.device}"
    if config.train.precision != "bf16":
        return f"train.precision={config.train.precision}"
    if config.train.deterministic:
        return "train.deterministic=true"
    if config.parallel.sequence > 1:
        return f"parallel.sequence={config.parallel.sequence}"
    return None
