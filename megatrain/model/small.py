"""A small random model of a configuration: the same classes and settings, few layers, narrow ones.

What a model does with the order of its tokens is decided by its classes and settings, not by its sizes; so a
small one of the same configuration answers for it, in a fraction of a second. Widths and heads are divided by
one number, so that what a configuration asks of its sizes (heads that make up the width, channels of a state
space) stays true; the first layers are kept, until one of each kind is there.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from megatrain.errors import ModelError, first_line
from megatrain.model.weights.parts import class_of, maker_of
from megatrain.model.weights.skeleton import parameters_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")

VOCAB_SIZE = 128
"""Most tokens that a small model knows."""

SPECIAL_TOKENS = 4
"""The first of them may have a meaning of their own, such as padding."""

_MOST_EXPERTS = 16
_MOST_INNER = 64
_MOST_PARAMETERS = 1 << 26
_NOISE = 0.1
"""The scale of noise on what a model's initialisation draws: some of it is zero, and would
hide what depends on what."""

_NAMES = """
layers: num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers
layers: num_decoder_layers num_encoder_layers
layer numbers: hybrid_layer_ids cross_attention_layers full_attn_idxs mlp_only_layers
width: hidden_size d_model n_embd emb_dim embedding_dim dim_model embedding_size word_embed_proj_dim
width: attention_hidden_size hidden_size_per_layer_input hidden_size_global q_lora_rank kv_lora_rank
width: o_lora_rank mamba_d_ssm lru_width
inner width: intermediate_size intermediate_size_mlp moe_intermediate_size shared_expert_intermediate_size
inner width: shared_experts_intermediate_size shared_intermediate_size dense_intermediate_size d_inner
inner width: moe_shared_expert_intermediate_size expert_ffn_hidden_size ffn_hidden_size feed_forward_size
inner width: ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff dff dim_ff
heads: num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
heads: encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads mamba_n_heads
heads: swa_num_attention_heads mamba_num_heads linear_num_value_heads linear_num_heads
groups of heads: num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads index_n_heads
groups of heads: num_global_key_value_heads linear_num_key_heads num_query_groups n_mamba_heads n_groups
groups of heads: mamba_n_groups
experts: num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num
vocabulary: vocab_size vocab_size_per_layer_input decoder_vocab_size encoder_hash_byte_group_vocab
at most one: n_group topk_group num_expert_group
none: num_kv_shared_layers num_nextn_predict_layers first_k_dense_replace num_dense_layers
"""
"""The names of sizes in configurations of transformers."""

_KIND = {
    name: kind
    for kind, names in (line.split(": ") for line in _NAMES.strip().splitlines())
    for name in names.split()
}
_NO_SIZES = frozenset({"id2label", "label2id", "rope_parameters", "rope_scaling"})
"""Dictionaries of a configuration without sizes to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """A way to make sizes small. Sizes that are small enough for one configuration, another one refuses."""

    num_heads: int
    """Fewest heads to leave; 0: widths and heads stay as they are."""
    keeps_inner: bool
    """The width inside of an MLP is divided like the others; else it is as small as in all small models."""
    of_a_kind: int = 1
    """Layers of each kind."""


_WAYS = (
    _Way(num_heads=2, keeps_inner=False),
    _Way(num_heads=2, keeps_inner=True),
    _Way(num_heads=4, keeps_inner=True),
    _Way(num_heads=2, keeps_inner=False, of_a_kind=2),
    _Way(num_heads=0, keeps_inner=True),
)


def try_small_model(
    config: PretrainedConfig, use: Callable[[PreTrainedModel], T], *, is_whole: bool = False
) -> T:
    """Make a small model of a configuration, and return what a function finds with it.

    The caller's random state is untouched, and the model has the same values each time.

    Args:
        config: The configuration of a causal language model; it is not changed.
        use: The function that is given the model, in evaluation mode, in fp32 on the CPU. If it cannot run
            the model, it is given one that was made in another way.
        is_whole: Whether the class that is trained is made; else its language model alone, where transformers
            has one.

    Raises:
        ModelError: No small model can be made, or none that runs.
    """
    make, config = (maker_of(config).from_config, config) if is_whole else _language_part(config)
    values = config.to_dict()
    failed: list[str] = []
    with _quiet(), torch.random.fork_rng(devices=[]):  # a trial in training mode draws its dropout
        for way in _WAYS:
            try:
                return use(_random(make, type(config)(**_shrunk(values, way, _divisor(values, way)))))
            except Exception as error:  # each class refuses in a way of its own what does not fit together
                failed.append(first_line(error))
    raise ModelError(f"no small model of {config.model_type} can be made to try it: {failed[0]}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Compute in one thread, which is several times faster for something small, and show no advice."""
    threads, level = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(level)


def _language_part(config: PretrainedConfig) -> tuple[Callable[..., PreTrainedModel], PretrainedConfig]:
    """Return what makes a language model, and the part of a configuration that it takes."""
    model_class: Any = class_of(config)
    try:
        text = config.get_text_config()
    except ValueError:  # there are several; which one is meant is for the model's class to say
        text = config
    if text is not config and getattr(model_class, "config_class", None) is type(text):
        return model_class._from_config, text
    whole = type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return maker_of(config if whole else text).from_config, config if whole else text


def _random(make: Callable[..., PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Make a model whose values all differ, and none of which is zero."""
    # grouped products would ask for widths of their own
    given = {"dtype": torch.float32, "experts_implementation": "eager"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with no_init_weights(), parameters_on_meta():
            size = sum(parameter.numel() for parameter in make(config, **given).parameters())
        if size > _MOST_PARAMETERS:
            raise ModelError(f"it has {size:,} parameters, where no small size is known")
        model = make(config, **given).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
    return model


def _shrunk(values: Mapping[str, Any], way: _Way, by: int) -> dict[str, Any]:
    """Return the values of a configuration with small sizes, those of configurations inside it too."""
    small = {name: value for name, value in values.items() if name != "transformers_version"}
    num_layers = _num_layers(values, way.of_a_kind)
    for name, value in values.items():
        if name == "per_layer_config" and isinstance(value, dict):
            first = {number: given for number, given in value.items() if int(number) < num_layers}
            small[name] = {number: given | _sizes(given, way, by) for number, given in first.items()}
        elif isinstance(value, dict) and name not in _NO_SIZES:
            small[name] = _shrunk(value, way, by)
        elif isinstance(value, list):
            small[name] = _short_list(name, value, values, num_layers, by)
        elif _is_size(value) and _KIND.get(name) == "layers":
            small[name] = min(value, num_layers)
    return small | _sizes(values, way, by)


def _sizes(values: Mapping[str, Any], way: _Way, by: int) -> dict[str, int]:
    """Return the small sizes among some values, divided by a number where they are widths or heads."""
    given = ((name, value) for name, value in values.items() if isinstance(name, str) and _is_size(value))
    small = {name: _size(name, value, way, by) for name, value in given}
    return {name: value for name, value in small.items() if value is not None}


def _size(name: str, value: int, way: _Way, by: int) -> int | None:
    """Return the small size in the place of one; None: it stays."""
    match _KIND.get(name):
        case "inner width" if not way.keeps_inner:
            return min(value, _MOST_INNER)
        case "inner width" | "width" | "heads":
            return max(value // by, min(value, 1))
        case "groups of heads":
            return value // by if value % by == 0 else 1
        case "experts":
            return min(value, _MOST_EXPERTS)
        case "vocabulary":
            return min(value, VOCAB_SIZE)
        case "at most one":
            return min(value, 1)
        case "none":
            return 0
        case _:
            return _token(value) if name.endswith(("_token_id", "_token_index")) else None


def _short_list(
    name: str, value: list[Any], values: Mapping[str, Any], num_layers: int, by: int
) -> list[Any]:
    """Return what a list says of the layers that are left."""
    if len(value) == _all_layers(values):
        is_width = "width" in _KIND.get(name, "")
        return [each // by if is_width and _is_size(each) else each for each in value[:num_layers]]
    if _KIND.get(name) == "layer numbers":
        return [number for number in value if number < num_layers]
    return [_token(each) for each in value] if name.endswith("_token_id") else value


def _token(number: int) -> int:
    """Return a token with a meaning of its own: none that the vocabulary of a small model lacks."""
    return number if number < VOCAB_SIZE else SPECIAL_TOKENS - 1


def _divisor(values: Mapping[str, Any], way: _Way) -> int:
    """Return what divides all numbers of heads and leaves enough of them; or widths, without heads."""
    if way.num_heads == 0:
        return 1
    heads = list(_find(values, "heads"))
    if not heads:
        return max(1, max(_find(values, "width"), default=1) // _MOST_INNER)
    common = math.gcd(*heads)
    divisors = [number for number in range(2, common + 1) if common % number == 0]
    return max((number for number in divisors if common // number >= way.num_heads), default=common)


def _find(values: Mapping[str, Any], kind: str) -> Iterator[int]:
    """Yield the sizes of a kind, in configurations inside this one too."""
    for name, value in values.items():
        if isinstance(value, dict) and name not in _NO_SIZES:
            yield from _find(value, kind)
        elif _KIND.get(name) == kind and _is_size(value) and value:
            yield value


def _all_layers(values: Mapping[str, Any]) -> int:
    sizes = {name: value for name, value in values.items() if _is_size(value)}
    return max((value for name, value in sizes.items() if _KIND.get(name) == "layers"), default=0)


def _num_layers(values: Mapping[str, Any], of_a_kind: int) -> int:
    """Return how many of the first layers have enough of each kind; 2 if there are as many."""
    number = _all_layers(values)
    lists = [each for each in values.values() if isinstance(each, list) and len(each) == number > 2]
    kinds = [tuple(each[layer] for each in lists if isinstance(each[layer], str)) for layer in range(number)]
    missing = Counter({kind: min(count, of_a_kind) for kind, count in Counter(kinds).items()})
    for layer, kind in enumerate(kinds):
        missing -= Counter([kind])
        if not missing:
            return min(number, max(2, layer + 1))
    return number


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
