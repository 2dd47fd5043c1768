"""The range of a model: how many tokens a row may have, and from where on its positions are scaled.

It follows from the configuration as transformers' rotary embeddings read it (`modeling_rope_utils.py`). YaRN
and linear scaling make a range longer by their factor, and so does `dynamic`; `llama3` and `longrope` have
the longer range in `max_position_embeddings` already. Of a model whose kinds of layers have rotary embeddings
of their own, those with full attention decide. Other models have a table of positions, or no limit.

This module loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.config.rope import LINEAR, YARN, described
from megatrain.errors import ConfigError

FULL = "full_attention"
"""The kind of layers whose rotary embeddings decide the range, where each kind has its own."""

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_TIMES_FACTOR = (YARN, LINEAR, "dynamic")
"""The scalings by whose factor the range becomes longer."""

OF_RUN = "model.rope_scaling='{{rope_type: yarn, factor: {factor}}}'"
OF_LOAD = "load(..., rope_scaling={{'rope_type': 'yarn', 'factor': {factor}}})"
OF_TRAINER = "MegatrainArguments(rope_scaling={{'rope_type': 'yarn', 'factor': {factor}}})"
"""What extends the range, by the place in which it is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRange:
    """The range of a model, in tokens of a row."""

    native: int | None
    """The longest row whose positions are not scaled; None if the configuration names no limit."""
    longest: int | None
    """The longest row, with positions that are scaled; equal to `native` where nothing is."""
    rope_type: str = ""
    """The kind of rotary embeddings by transformers' name, `default` if unscaled; empty: there are none."""
    factor: float | None = None
    """The factor of the scaling, where it has one."""
    is_of_kinds: bool = False
    """Kinds of layers have rotary embeddings of their own, and these are of layers with full attention."""

    @property
    def scaling(self) -> str:
        """The scaling in a few words; empty if there is none."""
        if self.rope_type in ("", "default"):
            return ""
        return described({"rope_type": self.rope_type, "factor": self.factor})

    def notes(self, seq_len: int) -> list[str]:
        """Say from where on positions are scaled, and how, if rows of so many tokens are longer than that."""
        if self.native is None or self.longest is None or not self.native < seq_len <= self.longest:
            return []
        where = " in layers with full attention" if self.is_of_kinds else ""
        return [
            f"rows of {seq_len:,} tokens are longer than the {self.native:,} that the model takes as it was "
            f"trained: its positions are scaled{where} ({self.scaling}), for up to {self.longest:,} tokens"
        ]


def row_range(config: Any) -> RowRange:
    """Return the range of a transformers configuration.

    Args:
        config: The configuration of a model, or of the language model in it.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lengths = (getattr(text, name, None) for name in _NAMES)
    named = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    parameters, is_nested = rope_parameters(text)
    if parameters is None:
        return RowRange(native=named, longest=named)
    kind, factor = str(parameters.get("rope_type", "default")), parameters.get("factor")
    original = parameters.get("original_max_position_embeddings")
    native = original if isinstance(original, int) and original > 0 else named
    factor = float(factor) if isinstance(factor, (int, float)) else None
    if named is None or native is None:
        return RowRange(native=named, longest=named, rope_type=kind, factor=factor, is_of_kinds=is_nested)
    longest = named
    # where kinds of layers differ, max_position_embeddings is the range with the scaling of one kind
    if kind in _TIMES_FACTOR and factor is not None and (original is not None or not is_nested):
        longest = max(named, int(native * factor))
    native = min(native, longest)
    return RowRange(native=native, longest=longest, rope_type=kind, factor=factor, is_of_kinds=is_nested)


def rope_parameters(text: Any) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the parameters of rotary embeddings that decide the range, and whether kinds of layers differ.

    Args:
        text: The configuration of a language model.

    Returns:
        None if the model has none, or none for layers with full attention.
    """
    parameters = getattr(text, "rope_parameters", None)
    has_biases = getattr(text, "alibi", False)  # Falcon's configuration has both, and its attention one
    if not isinstance(parameters, Mapping) or not parameters or has_biases:
        return None, False
    kinds = kinds_of(text)
    if not kinds:
        return parameters, False
    own = parameters[FULL] if FULL in kinds else next(iter(parameters[kind] for kind in kinds))
    return own, True


def kinds_of(text: Any) -> list[str]:
    """Return the kinds of layers that have rotary embeddings of their own; none where all have the same."""
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or not hasattr(text, "nested_rope_parameter_keys"):
        return []
    return list(text.nested_rope_parameter_keys(parameters))


def check_row(
    seq_len: int,
    rows: RowRange,
    *,
    named: str = "data.seq_len {seq_len}",
    extends: str = OF_RUN,
    is_set: bool = False,
) -> None:
    """Refuse a row that is longer than the range of a model.

    Args:
        seq_len: The number of tokens of the row.
        rows: The range of the model.
        named: The words for the row, with its `seq_len`.
        extends: One of `OF_RUN`, `OF_LOAD` and `OF_TRAINER`, for the way out.
        is_set: Whether the scaling of the model was set there.

    Raises:
        ConfigError: The row is beyond the range.
    """
    longest = rows.longest
    if longest is None or seq_len <= longest:
        return
    scaling = f" ({rows.scaling})" if rows.scaling and longest != rows.native else ""
    ways = [f"use {longest} or less"]
    if rows.rope_type and rows.native and (is_set or not rows.scaling):
        ways.append(extends.format(factor=math.ceil(seq_len / rows.native)))
    raise ConfigError(
        f"{named.format(seq_len=seq_len)} is beyond the model's context of {longest} tokens{scaling}; "
        f"{', or '.join(ways)}"
    )
