"""Which heads are one linear layer with cross-entropy behind it, so that their gradients need no autograd.

Settings do not tell: models scale their logits, or cap them, by names of their own. A small model of the
configuration is run once, and what its loss is given is held against its linear layer's own result.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain.model.small import SPECIAL_TOKENS, try_small_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-5
"""Of a small model's logits in fp32, as a part of their largest."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a model makes of its linear layer's results before cross-entropy."""

    scale: float = 1.0
    cap: float | None = None
    """With a soft cap, z becomes cap * tanh(z / cap)."""

    def of(self, raw: Tensor) -> Tensor:
        """Return the logits of a linear layer's results, in fp32."""
        logits = raw.float() if self.scale == 1.0 else raw.float() * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def form_of(config: PretrainedConfig) -> Form | None:
    """Return the form of the head of a configuration's models; None: it is no plain linear one.

    Args:
        config: The configuration of a causal language model; it is not changed.
    """
    described = config.to_dict() | {"_name_or_path": ""}
    key = json.dumps([config.model_type, described], sort_keys=True, default=str)
    if key not in _FOUND:
        if len(_FOUND) >= _MOST_KNOWN:
            _FOUND.clear()
        try:
            _FOUND[key] = try_small_model(config, _look)
        except Exception as error:  # of a model with other parts, whose configuration makes no small one
            _log.debug("the head of %s is not known: %s", config.model_type, error)
            _FOUND[key] = None
    return _FOUND[key]


_FOUND: dict[str, Form | None] = {}
_MOST_KNOWN = 64


def linear_of(model: PreTrainedModel) -> nn.Linear | None:
    """Return the linear layer of a model's head; None: it is none, or does something else."""
    linear = model.get_output_embeddings()
    is_plain = type(linear) is nn.Linear and "forward" not in vars(linear)
    return linear if is_plain and model.loss_function is ForCausalLMLoss else None


def _look(model: PreTrainedModel) -> Form | None:
    """Return the form of a small model's head."""
    linear = linear_of(model)
    if linear is None:
        return None
    results: list[Tensor] = []
    given: list[dict[str, Any]] = []

    def spy(*args: Any, **named: Any) -> Tensor:
        given.append(named if "logits" in named else {"logits": args[0], **named})
        return torch.zeros(())

    linear.register_forward_hook(lambda _, __, result: results.append(result))
    model.loss_function = spy
    size = min(linear.out_features, model.get_input_embeddings().num_embeddings)
    ids = torch.arange(16)[None] * 7 % (size - SPECIAL_TOKENS) + SPECIAL_TOKENS
    with torch.no_grad():
        model(input_ids=ids, labels=ids, use_cache=False)
    if len(results) != 1 or len(given) != 1 or given[0]["logits"].shape != results[0].shape:
        return None
    raw, logits = results[0].double(), given[0]["logits"].double()
    close = _TOLERANCE * float(logits.abs().max())
    forms = _forms(model.config, raw, logits)
    return next((form for form in forms if (form.of(raw) - logits).abs().max() <= close), None)


def _forms(config: PretrainedConfig, raw: Tensor, logits: Tensor) -> Iterator[Form]:
    """Yield the forms that a head may have, the simplest one first."""
    yield Form()
    named = {
        name: float(value) for name, value in config.get_text_config().to_dict().items() if _is_number(value)
    }
    yield from (Form(cap=value) for name, value in named.items() if "cap" in name)
    scale = float((raw * logits).sum() / raw.square().sum())
    exact = [number for value in named.values() for number in (value, 1 / value)]
    yield Form(scale=next((number for number in exact if abs(number / scale - 1) < 1e-6), scale))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
