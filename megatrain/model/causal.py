"""Refuses models in which a token sees those behind it: trained to predict them, they are told the answers.

No setting says which those are: of thirty types whose configuration has `is_decoder` false, some are decoders
all the same. So a small model of the configuration is asked: it is given two rows that differ in their last
token alone, and what comes out before that token must be equal.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import torch

from megatrain.errors import ModelError
from megatrain.model.small import SPECIAL_TOKENS, VOCAB_SIZE, try_small_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)

_NUM_TOKENS = 12
_MOST_DIFFERENCE = 1e-3
"""The allowed difference of logits, as a part of their spread. Rounding makes a thousandth of this, an
encoder a hundred times as much."""


def refuse_encoder(config: PretrainedConfig) -> None:
    """Refuse a configuration of a model whose tokens see those behind them.

    Args:
        config: The configuration of a causal language model as transformers names it; it is not changed.

    Raises:
        ModelError: The configuration is that of an encoder.
    """
    described = {**config.to_dict(), "_name_or_path": ""}
    key = json.dumps([config.model_type, described], sort_keys=True, default=str)
    if key not in _CAUSAL:
        if len(_CAUSAL) >= _MOST_KNOWN:
            _CAUSAL.clear()
        _CAUSAL[key] = _is_causal(config)
    if _CAUSAL[key]:
        return
    where = f"{config.name_or_path}: " if config.name_or_path else ""
    way = "; if it is a decoder, write is_decoder: true into its config.json" * hasattr(config, "is_decoder")
    raise ModelError(
        f"{where}this {config.model_type} model is an encoder: what it says of a token depends on the tokens "
        "behind it, and trained to predict those, it would see them. Causal language models are trained "
        f"here, not encoders or models of embeddings{way}"
    )


_CAUSAL: dict[str, bool] = {}
_MOST_KNOWN = 64


def _is_causal(config: PretrainedConfig) -> bool:
    try:
        difference = try_small_model(config, _difference)
    except ModelError as error:
        _log.warning("%s; so nobody has checked that its tokens do not see those behind them", error)
        return True
    return difference < _MOST_DIFFERENCE


def _difference(model: PreTrainedModel) -> float:
    """Return how much the last token changes the logits of those before it."""
    first, size = SPECIAL_TOKENS, model.get_input_embeddings().num_embeddings
    tokens = torch.arange(_NUM_TOKENS) * 7 % (min(size, VOCAB_SIZE) - first) + first
    rows = tokens.repeat(2, 1)
    rows[1, -1] = first if rows[1, -1] != first else first + 1
    with torch.no_grad():
        logits = model(input_ids=rows, use_cache=False).logits.float()
    one, other = logits[:, :-1]
    if not logits.isfinite().all():
        raise ModelError("its outputs are not finite")
    return float((one - other).abs().max() / logits.std())
