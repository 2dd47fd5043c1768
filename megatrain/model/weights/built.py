"""A model's class as transformers builds it for a dtype: which of its tensors have a dtype of their own."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megatrain.errors import ModelError
from megatrain.model.weights.skeleton import (
    first_line,
    initialise_buffers,
    keep_float32,
    parameters_on_meta,
)

_log = logging.getLogger(__name__)


def built_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model as transformers builds it for weights of `dtype`: some tensors have one of their own.

    Args:
        model: The model, of any dtype; if it has adapters, the model inside is built.
        dtype: The dtype of the weights, which are on the meta device. Nobody may change what is returned.

    Raises:
        ModelError: The class takes more than its configuration.
    """
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = inside.config
    return _build(_Recipe(type(inside), config.to_json_string(use_diff=False), dtype, config))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The facts that decide how a model is built."""

    kind: type[PreTrainedModel]
    written: str
    """The model's configuration, as text."""
    dtype: torch.dtype
    config: PretrainedConfig = field(compare=False)


@lru_cache(maxsize=4)
def _build(recipe: _Recipe) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), no_init_weights(), parameters_on_meta():
        try:
            built = recipe.kind._from_config(copy.deepcopy(recipe.config), dtype=recipe.dtype)
        except Exception as error:  # a class of the caller's may take anything
            raise ModelError(
                f"{recipe.kind.__name__} cannot be built from its configuration: {first_line(error)}"
            ) from error
    keep_float32(built, recipe.dtype)
    with torch.random.fork_rng(devices=[]):
        initialise_buffers(built)
    return built


def cast_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model's buffers the dtypes of one that transformers builds with weights of `dtype`.

    Some follow the weights, such as tables of positions that are added to embeddings, and others, such as
    rotary frequencies, never do: the model's class says it, built without weights.
    """
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    if inside.dtype == dtype or all(buffer.dtype != inside.dtype for buffer in inside.buffers()):
        return
    try:
        built = built_in(model, dtype)
    except ModelError as error:
        _log.warning(
            "%s; so its buffers stay as they are: if they are added to weights, load the model in %s",
            error,
            str(dtype).removeprefix("torch."),
        )
        return
    own = dict(inside.named_modules())
    for path, module in built.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            found = own[path]._buffers.get(leaf) if path in own else None
            if found is None or found.dtype == buffer.dtype:
                continue
            is_computed = leaf in module._non_persistent_buffers_set  # anew, not from what was rounded once
            own[path]._buffers[leaf] = buffer.clone() if is_computed else found.to(buffer.dtype)
