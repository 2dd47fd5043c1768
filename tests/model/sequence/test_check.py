"""Models that compute something else in shards of rows are refused, and others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from megatrain.errors import ConfigError, ModelError
from megatrain.model.sequence.check import refuse_config, refuse_model
from megatrain.model.torch_state import RandomState
from tests.families import FAMILIES
from tests.reference import make_model


def check(config: PretrainedConfig, change: Callable[[PreTrainedModel], None] = lambda _: None) -> None:
    """Make a model, change it, and refuse it for two ranks if it computes something else there."""
    model = make_model(config)
    change(model)

    def run(batch: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            return model(**batch, return_dict=True, use_cache=False)

    refuse_model(model, 2, run, lambda: RandomState(torch.device("cpu")))


def check_all(config: PretrainedConfig) -> None:
    """Refuse a family for two ranks, by its configuration or by what its model computes."""
    refuse_config(config, 2)
    check(config)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", *(pytest.param(name, marks=pytest.mark.parity) for name in FAMILIES)]
)
def test_families_pass_or_are_refused_in_a_sentence(family: str) -> None:
    config = FAMILIES[family]()
    config.output_router_logits = False
    refused = {"falcon", "falcon_alibi", "bloom", "gpt_oss", "qwen3_next", "jamba", "mamba2", "mpt"}
    if family not in refused:
        check_all(config)
        return
    with pytest.raises(ModelError, match=r"; use parallel.sequence=1$"):
        check_all(config)


class _Shifted(nn.Module):
    """A mlp that mixes each token with the one before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden + 0.1 * nn.functional.pad(hidden, (0, 0, 1, -1)))


class _Convolution(_Shifted):
    """A mlp behind a convolution over three tokens."""

    def forward(self, hidden: Tensor) -> Tensor:
        kernel = torch.full((hidden.shape[-1], 1, 3), 0.2)
        mixed = nn.functional.conv1d(hidden.mT, kernel, padding=2, groups=hidden.shape[-1])
        return self.inner(mixed[..., : hidden.shape[1]].mT)


class _Attention(nn.Module):
    """Attention that does not ask the registry."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        each = hidden_states[:, None]
        return nn.functional.scaled_dot_product_attention(each, each, each, is_causal=True)[:, 0], None


def _in_layer(name: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        layer = model.model.layers[2]
        setattr(layer, name, make(getattr(layer, name)))

    return change


@pytest.mark.parametrize(
    "change",
    [
        _in_layer("mlp", _Shifted),
        _in_layer("mlp", _Convolution),
        _in_layer("self_attn", lambda _: _Attention()),
    ],
    ids=["token shift", "convolution", "attention of its own"],
)
def test_a_layer_that_looks_past_its_shard_is_found(change: Callable[[PreTrainedModel], None]) -> None:
    with pytest.raises(ModelError, match="tokens see others elsewhere than in attention"):
        check(FAMILIES["llama"](), change)


def test_a_loss_that_shifts_labels_itself_is_found() -> None:
    def change(model: PreTrainedModel) -> None:
        def loss(
            logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
        ) -> Tensor:
            flat, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            total = nn.functional.cross_entropy(flat, targets, reduction="sum")
            return total / (targets.numel() if num_items_in_batch is None else num_items_in_batch)

        model.loss_function = loss

    with pytest.raises(ModelError, match="its loss is another"):
        check(FAMILIES["llama"](), change)


def test_dropout_is_refused() -> None:
    config = FAMILIES["llama"]()
    config.attention_dropout = 0.1
    with pytest.raises(ModelError, match=r"draws random numbers \(dropout\)"):
        check(config)


@pytest.mark.parametrize(
    ("changes", "number", "error", "sentence"),
    [
        (
            {"num_attention_heads": 16, "num_key_value_heads": 4},
            8,
            ConfigError,
            "16 attention heads and 4 of",
        ),
        ({"num_attention_heads": 16, "num_key_value_heads": 4}, 8, ConfigError, "use one of 1, 2, 4$"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, 2, ConfigError, "use 1$"),
        ({"output_router_logits": True}, 2, ModelError, "router loss"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            2,
            ModelError,
            "rotary embeddings that follow the row's length .dynamic.",
        ),
    ],
)
def test_configurations_are_refused(
    changes: dict[str, Any], number: int, error: type[Exception], sentence: str
) -> None:
    refuse_config(LlamaConfig(num_attention_heads=8), number)
    with pytest.raises(error, match=sentence):
        refuse_config(LlamaConfig(**changes), number)
