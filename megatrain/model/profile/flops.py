"""FLOPs of a token, counted from the live model: parameters that it passes, and causal attention at half.

A parameter costs a token 2 FLOPs forward, 2 for the gradient of its input and 2 for its own gradient if it is
trained. What lookups read costs none: embeddings count only where the head shares them. Of the experts a
token passes the active ones. The scans of Mamba and linear attention are not counted, only their parameters.
It works on the meta device too.

Source: 6 N per token with attention apart: Kaplan et al., "Scaling laws for neural language models", 2020,
and Chowdhery et al., "PaLM", 2022, appendix B, with causal attention at half.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from megatrain.config.policies import Policy
from megatrain.errors import warn_once
from megatrain.model.attention_results import is_softmax_attention
from megatrain.model.blocks import is_beside
from megatrain.model.layer_configs import layer_config, layer_configs
from megatrain.model.weights.parts import beside_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)

_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_NUM_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts", "top_k")


@dataclass(frozen=True, slots=True)
class Attention:
    """The properties of a layer's attention on which its cost depends."""

    key_width: int
    """Query heads times the size of a query and a key."""
    value_width: int
    """Query heads times the size of a value."""
    window: int | None = None
    """Tokens that a token sees at most; None: all before it."""

    def forward_flops(self, seq_len: int) -> float:
        """Return the FLOPs of a token's two products with what it sees, on average over a row."""
        return 2.0 * (self.key_width + self.value_width) * mean_keys(seq_len, self.window)


@dataclass(frozen=True, slots=True)
class Part:
    """A decoder layer, or all that is in none."""

    active: float
    """Parameters that a token passes."""
    trained: float
    """The trained ones of these parameters."""
    attention: Attention | None = None

    def forward_flops(self, seq_len: int) -> float:
        """Return the FLOPs of a token's forward, in a row of `seq_len` tokens."""
        attention = 0.0 if self.attention is None else self.attention.forward_flops(seq_len)
        return 2.0 * self.active + attention

    def flops(self, seq_len: int) -> float:
        """Return the FLOPs of a token's forward and backward, nothing recomputed."""
        return 2.0 * self.forward_flops(seq_len) + self._weight_flops(seq_len)

    def rerun_flops(self, seq_len: int, policy: Policy) -> float:
        """Return the FLOPs of a token's forward that run again under an activation policy."""
        if not policy.reruns:
            return 0.0
        products = 0.0 if policy.keeps_products else 2.0 * self.active
        if self.attention is None or policy.keeps_attention:
            return products
        return products + self.attention.forward_flops(seq_len)

    def _weight_flops(self, seq_len: int) -> float:
        # attention has two operands that both want a gradient, whatever is trained
        attention = 0.0 if self.attention is None else self.attention.forward_flops(seq_len)
        return 2.0 * self.trained + attention


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The FLOPs of a token in each part of a model."""

    layers: tuple[Part, ...]
    rest: Part
    """Embeddings that are no lookups, final norm, head."""
    head: float
    """Parameters of the head, as far as it is a matrix of its own or the embedding's."""

    def model_flops(self, seq_len: int) -> float:
        """Return the model FLOPs of a token: forward and backward, nothing recomputed."""
        return sum(part.flops(seq_len) for part in (*self.layers, self.rest))

    def recomputed_flops(
        self, seq_len: int, forwards: Sequence[int], parts: Mapping[int, Policy] | None = None
    ) -> float:
        """Return the FLOPs of a token's further forwards.

        Args:
            seq_len: The tokens of a row.
            forwards: The number of further forwards through each layer that run as a whole.
            parts: The policies, by layer, of those of whose forward a part runs again beside these.
        """
        pairs = zip(self.layers, forwards, strict=True)
        whole = sum(number * layer.forward_flops(seq_len) for layer, number in pairs)
        return whole + sum(self.layers[n].rerun_flops(seq_len, p) for n, p in (parts or {}).items())

    @property
    def head_flops(self) -> float:
        """Return the FLOPs of a token's forward through the head."""
        return 2.0 * self.head


def mean_keys(seq_len: int, window: int | None) -> float:
    """Return how many tokens a token of a row sees on average: half of the row, or less with a window."""
    width = seq_len if window is None else min(window, seq_len)
    return width * (1.0 - width / (2.0 * seq_len))


def count_flops(model: PreTrainedModel, layers: Sequence[nn.Module]) -> ModelFlops:
    """Count what a token of `model` costs.

    Args:
        model: A causal LM, with parameters of any device.
        layers: The model's decoder layers, in forward order.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    lookups = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head_weight
    }
    share = _active_share(config)
    beside = beside_text(model)
    seen = lookups | beside
    parts = [
        _part(
            layer.named_parameters(),
            share,
            seen,
            None if is_beside(layer, beside) else _attention(layer, config, number),
        )
        for number, layer in enumerate(layers)
    ]
    rest = _part(model.named_parameters(), share, seen, None)
    return ModelFlops(tuple(parts), rest, 0.0 if head_weight is None else float(head_weight.numel()))


def _part(
    parameters: Iterable[tuple[str, nn.Parameter]],
    share: float | None,
    seen: set[int],
    attention: Attention | None,
) -> Part:
    active = trained = 0.0
    for name, parameter in parameters:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        count = float(parameter.numel())
        if "experts" in name.split("."):
            if share is None:
                warn_once(_log, ALL_EXPERTS)
            count *= share or 1.0
        active += count
        trained += count if parameter.requires_grad else 0.0
    return Part(active, trained, attention)


def active_parameters(model: PreTrainedModel) -> int:
    """Count the parameters that a token passes, lookups included: of the experts, the active ones."""
    share = _active_share(model.config.get_text_config())
    return round(_part(model.named_parameters(), share, beside_text(model), None).active)


def _active_share(config: PretrainedConfig) -> float | None:
    """Return the share of the experts that a token passes; None: the config does not say."""
    experts = experts_of(config)
    return None if experts is None else experts[1] / experts[0]


def experts_of(config: PretrainedConfig) -> tuple[int, int] | None:
    """Return the experts of a layer and of a token; None: there are none, or the config does not say."""
    for layer in layer_configs(config.get_text_config()):
        total, active = _first(layer, _NUM_EXPERTS), _first(layer, _NUM_ACTIVE)
        if total and active:
            return total, active
    return None


def _first(config: PretrainedConfig, names: Iterable[str]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)


ALL_EXPERTS = "the config does not say how many experts are active: the FLOPs count all of them"


def counts_all_experts(model: PreTrainedModel) -> bool:
    """Whether FLOPs count all experts, since the configuration does not say how many are active."""
    names = (name for name, _ in model.named_parameters())
    return _active_share(model.config.get_text_config()) is None and any(
        "experts" in name.split(".") for name in names
    )


def _attention(layer: nn.Module, config: PretrainedConfig, number: int) -> Attention | None:
    """Return a layer's attention, None if its tokens mix by other means (Mamba, linear attention)."""
    found = next((module for module in layer.modules() if is_softmax_attention(module)), None)
    if found is None:
        return None
    number = getattr(found, "layer_idx", number)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[number] if kinds and isinstance(number, int) and number < len(kinds) else None
    if kind is not None and "linear" in kind:
        return None
    if isinstance(number, int):
        config = layer_config(config, number)
    slides = getattr(config, "use_sliding_window", True) if kind is None else _is_local(kind)
    window = _first(config, ("sliding_window", "attention_chunk_size")) if slides else None
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if not heads:  # such as RWKV's, whose tokens mix by a state
        return None
    whole = getattr(config, "head_dim", None) or config.hidden_size // heads
    key, value = whole, getattr(config, "v_head_dim", None) or whole
    if getattr(config, "qk_nope_head_dim", None) is not None:  # multi-head latent attention
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
    return Attention(heads * key, heads * value, window)


def _is_local(kind: str) -> bool:
    return "sliding" in kind or "chunked" in kind
