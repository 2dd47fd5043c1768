"""Refuses attention masks whose size is a long row's length squared, before they are made.

Where attention has a form without a mask (`is_causal`, or kernels that know windows and rows), transformers
makes none; sliding windows under `sdpa`, padding, packed rows and eager attention need one. Every mask of its
models is made by a function of `AttentionMaskInterface`, which asks a `mask_function` which token sees which
only if there has to be a mask. So that is where long ones are refused: whatever the model, and as late as its
own code decides, but before anything of that size is allocated. Where torch attends, it is asked whether the
device has a kernel that makes no scores. While a model is counted, attention kernels, softmax and the shapes
of all tensors are watched beside that (`Meter`), for what comes from anywhere else.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from transformers import masking_utils
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from megatrain.config.attention import BY_DOCUMENT, MOST_TOKENS, TILED, VARLEN
from megatrain.errors import ConfigError
from megatrain.model.kernels import spares_scores

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class LongAttentionError(Exception):
    """Attention takes a matrix of a long row's length squared, of which only the size is known."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__(f"{queries} x {keys}")
        self.queries, self.keys = queries, keys


def is_long(queries: int, keys: int) -> bool:
    """Whether a matrix of so many queries and keys is refused."""
    return queries * keys > MOST_TOKENS**2


def check_pairs(values: Iterable[Any], *, dims: int = 4) -> None:
    """Refuse tensors with a value for each query and key: masks, or scores.

    Args:
        values: Tensors are looked at, all else is passed over.
        dims: Least dimensions of such a tensor: rows and heads, queries and keys.

    Raises:
        LongAttentionError: One is too large.
    """
    for value in values:
        if isinstance(value, Tensor) and value.ndim >= dims and is_long(value.shape[-2], value.shape[-1]):
            raise LongAttentionError(value.shape[-2], value.shape[-1])


def refuse_given_masks(model: PreTrainedModel, given: object) -> None:
    """Refuse a mask for pairs of tokens among the arguments of a model's forward, before it is copied.

    Raises:
        ConfigError: There is one, and it is too large.
    """
    try:
        check_pairs(tree_leaves(given))
    except LongAttentionError as error:
        raise refused(model, error.queries, error.keys, "the batch has a mask of pairs") from error


def refused(model: PreTrainedModel, queries: int, keys: int, cause: str, *ways: str) -> ConfigError:
    """Make the one sentence that refuses a mask: of which model, why, and what to do."""
    config = model.config.get_text_config()
    return ConfigError(
        f"the {config.model_type} model, with model.attn_implementation={config._attn_implementation}, "
        f"would make an attention mask or scores of {queries:,} x {keys:,} tokens ({cause}), and none "
        f"beyond {MOST_TOKENS:,} x {MOST_TOKENS:,} is made; use "
        f"{', or '.join((*ways, f'rows of at most {MOST_TOKENS:,} tokens (data.seq_len)'))}"
    )


def dropout_of(config: PretrainedConfig) -> str | None:
    """Say which dropout a model has in attention; None: it has none."""
    for name, value in config.get_text_config().to_dict().items():
        if "att" in name and "drop" in name and isinstance(value, float) and value > 0:
            return f"dropout in attention ({name}={value:g})"
    return None


def without_mask(model: PreTrainedModel) -> tuple[str, ...]:
    """Name what knows windows, padding and packed rows by itself, if the model has it."""
    config = model.config.get_text_config()
    if getattr(config, "alibi", False):
        return ()
    dropout = dropout_of(config)
    ways = [] if dropout is None else [f"no {dropout}"]
    is_able = dropout is None and getattr(model, "_supports_attention_backend", False)
    if is_able and config._attn_implementation != TILED:
        ways.append(f"model.attn_implementation={TILED}, which needs none")
    if getattr(model, "_supports_flash_attn", False):
        known = getattr(model, "_compatible_flash_implementations", None) or ("flash_attention_2",)
        ways.append(f"model.attn_implementation={known[0]}, a package that needs none")
    return tuple(ways)


# -- masks that transformers makes -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class _Guard:
    """A model whose long masks are refused. It is not held: who drops an attached model gets memory back."""

    model: weakref.ref[PreTrainedModel]
    configs: frozenset[int]
    """The ids of its configurations."""


_guards: list[_Guard] = []
"""One for each request."""


@contextmanager
def long_masks_refused(model: PreTrainedModel) -> Iterator[None]:
    """Let transformers make no long mask for a model, in any thread; others in the process are left alone.

    Inside, a forward of the model that would make one raises a ConfigError, in one sentence.
    """
    configs = {id(config) for module in model.modules() if (config := getattr(module, "config", None))}
    guard = _Guard(weakref.ref(model), frozenset(configs))
    makers: dict[str, Any] = AttentionMaskInterface._global_mapping
    kernels: dict[str, Any] = AttentionInterface._global_mapping
    _guards.append(guard)
    for name, make in makers.items():
        # flex attention asks its mask_function to make a mask of blocks, which is 16,384 times smaller
        if make is not masking_utils.flex_attention_mask and not hasattr(make, "refuses_long"):
            makers[name] = _refusing(make)
    if not hasattr(kernels["sdpa"], "refuses_long"):
        kernels["sdpa"] = _without_scores(kernels["sdpa"])
    try:
        yield
    finally:
        _guards.remove(guard)
        if not _guards:
            for functions in (makers, kernels):
                for name, function in functions.items():
                    if hasattr(function, "refuses_long"):
                        functions[name] = function.__wrapped__


def _refusing(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def mask(**given: Any) -> Any:
        model = _guarded(given.get("config"))
        if model is not None and is_long(given["q_length"], given["kv_length"]):
            refuse: Any = partial(_refuse, model, given)
            refuse.stands_for = given.get("mask_function", masking_utils.causal_mask_function)
            given = {**given, "mask_function": refuse}
        return make(**given)

    mask.refuses_long = True  # type: ignore[attr-defined]
    return mask


def _guarded(config: PretrainedConfig | None) -> PreTrainedModel | None:
    found = (guard.model() for guard in _guards if id(config) in guard.configs)
    return next((model for model in found if model is not None), None)


def _refuse(model: PreTrainedModel, given: Mapping[str, Any], *_: Any) -> NoReturn:
    """Stand for a mask's rule: it is asked, so there has to be a mask."""
    window, ways = given.get("local_size"), without_mask(model)
    is_padded = given.get("attention_mask") is not None
    if window is not None and given["kv_length"] >= window:
        cause = f"its window of {window:,} tokens needs one"
    elif is_padded:
        cause = "an attention_mask with padding needs one"
        ways = ("rows without padding", *ways)
    elif given["config"]._attn_implementation == "eager":
        cause = "eager attention always has one"
        if getattr(model, "_supports_sdpa", False):
            ways = ("model.attn_implementation=sdpa", *ways)
    else:
        cause = "packed rows (position_ids), or a rule of its own for what a token sees, need one"
        if dropout_of(given["config"]) is None:
            ways = (f"model.attn_implementation={VARLEN} ({BY_DOCUMENT} on a CPU) for packed rows", *ways)
    raise refused(model, given["q_length"], given["kv_length"], cause, *ways)


# -- scores that torch makes, and what is added to them ------------------------------------------------------


def _without_scores(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' function for torch's attention: nobody may have foreseen a row of this length."""

    @functools.wraps(attend)
    def attend_checked(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any
    ) -> Any:
        if is_long(query.shape[2], key.shape[2]) and not torch.compiler.is_compiling():
            model = _guarded(getattr(module, "config", None))
            if model is not None and not isinstance(query, FakeTensor):  # a count sees all that is made
                _refuse_scores(model, query, key, value, named)
        return attend(module, query, key, value, *given, **named)

    attend_checked.refuses_long = True  # type: ignore[attr-defined]
    return attend_checked


def _refuse_scores(
    model: PreTrainedModel, query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]
) -> None:
    queries, keys = query.shape[2], key.shape[2]
    if given.get("position_bias") is not None:
        raise refused(model, queries, keys, "it adds a bias of positions to scores", *without_mask(model))
    groups_known = use_gqa_in_sdpa(None, key, value)
    if not groups_known:  # transformers repeats keys and values: here they take no memory
        key, value = (each[:, :1].expand(-1, query.shape[1], -1, -1) for each in (key, value))
    dropout, scale = given.get("dropout", 0.0), given.get("scaling")
    if not spares_scores(query, key, value, dropout=dropout, scale=scale):
        cause = f"on {query.device.type} torch has no kernel that spares them"
        if dropout:
            raise refused(
                model, queries, keys, f"{cause} with dropout of attention", "no dropout of attention"
            )
        sizes = f"{query.shape[-1]} and {value.shape[-1]} elements in {query.dtype}"
        raise refused(model, queries, keys, f"{cause} for heads of {sizes}", *without_mask(model))
