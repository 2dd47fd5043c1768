"""What torch's variable-length attention, and attention by tiles, can do: which models, on which devices.

Where neither can, packed rows get a mask, as `sdpa` takes it. Whether a model attends within documents alone
is not read from its code: a small one of its configuration has to give the logits that it gives with a mask.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatrain.config.attention import (
    BY_DOCUMENT,
    EITHER_WHERE_ABLE,
    FLEX,
    TILED,
    TILED_WHERE_ABLE,
    VARLEN,
    WHERE_ABLE,
)
from megatrain.errors import ConfigError, ModelError, first_line
from megatrain.hardware.accelerators import vendor_of
from megatrain.model.documents import varlen
from megatrain.model.documents.begins import Packed, documents, set_attention, told_of
from megatrain.model.layer_configs import layer_configs
from megatrain.model.masks import dropout_of
from megatrain.model.small import try_small_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
"""What torch's kernel computes in."""
_MOST_HEAD_DIM, _HEAD_DIM_STEP = 256, 8
_NO_HEAD_DIMS = range(193, 225)
"""The sizes of heads whose backward some GPUs lack (compute capabilities 8.6, 8.9 and 12), as torch's
`aten/native/transformers/cuda/sdp_utils.cpp` has it."""
_HEAD_DIMS = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
"""The names that configurations have for the sizes of heads."""
_LEAST_CAPABILITY = (8, 0)
"""NVIDIA's compute capability from which torch has the kernel: Ampere."""
_WHERE_ABLE = frozenset((WHERE_ABLE, TILED_WHERE_ABLE, EITHER_WHERE_ABLE))
_KERNEL = "aten::_flash_attention_forward"
_LENGTHS = ((5, 3), (2, 6))
"""The lengths of documents in the rows that a small model is tried with."""

LIMITS = {
    "fp32 (`train.precision`)": "the mask",
    "`train.deterministic=true`": "the mask",
    "`parallel.sequence` above 1": "the mask, of whole rows",
    "heads of more than 256, of 193 to 224, not of a multiple of 8, or with keys and values of two sizes": (
        "the mask"
    ),
    "dropout in attention": "the mask",
    "soft caps, sinks, biases of positions, layers that are not told where documents begin": "the mask",
    "chunks shorter than the row, padding, rules of a model's own": "the mask, in these layers",
    "windows in a torch whose kernel takes none": "the mask, in these layers",
    "devices without torch's kernel: all but NVIDIA's from Ampere on, torch before 2.10": "the mask",
}
"""The cases in which variable-length attention is not used by default, and what is used then."""


def implementation_of(config: PretrainedConfig, asked: str | None, dtype: torch.dtype) -> str | None:
    """Return the attention implementation of a model for what is asked; None: what transformers chooses.

    Args:
        config: The model's configuration.
        asked: The name of an implementation, `WHERE_ABLE` and its like among them.
        dtype: The dtype in which the model computes.

    Raises:
        ConfigError: Attention by tiles is asked for by name, and cannot do the model.
    """
    if asked == TILED:
        require_tiles(config)
    if asked not in _WHERE_ABLE:
        return asked
    if asked != TILED_WHERE_ABLE:
        reason = why_not(config, dtype)
        if reason is None:
            return VARLEN
        if asked == WHERE_ABLE:
            say_masked(reason)
            return None
    reason = why_not_tiled(config)
    if reason is None:
        return TILED
    _log.info("long rows are attended to as transformers chooses: attention by tiles cannot do %s", reason)
    return None


def counted_as(config: PretrainedConfig, asked: str | None, dtype: torch.dtype) -> str | None:
    """Return the implementation by whose operations a model is counted, on a CPU, for what is asked.

    Args:
        config: The model's configuration.
        asked: The name of an implementation; None: what transformers chooses.
        dtype: The dtype in which the model computes.

    Raises:
        ConfigError: There is no such attention.
    """
    if asked is not None and asked not in _WHERE_ABLE:
        require_name(asked, "")
    if asked == FLEX:  # it keeps what varlen keeps, and makes no mask of every pair either
        return VARLEN if why_not(config, dtype) is None else "sdpa"
    return implementation_of(config, asked, dtype)


def require_name(name: str, device: str) -> None:
    """Refuse an attention implementation that transformers has not, or that a kind of device cannot train.

    Args:
        name: The name of the implementation. One with a slash is a kernel's repository.
        device: The kind of device, such as `cuda`; empty: any.

    Raises:
        ConfigError: It cannot be.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key)})
    plain = name.removeprefix("paged|")
    if plain not in known and "/" not in name:
        raise ConfigError(
            f"model.attn_implementation is {name!r}, which transformers does not have; use "
            f"{', '.join(known[:-1])} or {known[-1]}, or leave it out"
        )
    if name == FLEX and device == "cpu":
        raise ConfigError(
            f"model.attn_implementation={FLEX} has no backward on the CPU; use sdpa, or leave it out"
        )


def say_masked(reason: str) -> None:
    """Log that packed rows get a mask, for a reason."""
    _log.info("rows of several documents get an attention mask: varlen cannot do %s", reason)


def why_not(config: PretrainedConfig, dtype: torch.dtype) -> str | None:
    """Say what of a model variable-length attention cannot do; None: it can do it.

    Args:
        config: The model's configuration.
        dtype: The dtype in which the model computes.
    """
    text = config.get_text_config()
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')}, only bfloat16 and float16"
    layers = layer_configs(text)
    dims = [dim for layer in layers for name in _HEAD_DIMS if (dim := getattr(layer, name, None))]
    dims = dims or [text.hidden_size // layer.num_attention_heads for layer in layers]
    if any(dim > _MOST_HEAD_DIM or dim % _HEAD_DIM_STEP or dim in _NO_HEAD_DIMS for dim in dims):
        low, high = _NO_HEAD_DIMS[0], _NO_HEAD_DIMS[-1]
        return (
            f"heads of {max(dims)}, only of multiples of {_HEAD_DIM_STEP} up to {_MOST_HEAD_DIM}, and none "
            f"of {low} to {high}"
        )
    if any(_has_two_sizes(layer) for layer in layers):
        return "keys and values of two sizes"
    return dropout_of(config) or why_not_without_mask(config)


def _has_two_sizes(layer: PretrainedConfig) -> bool:
    """Whether keys and values of a layer have heads of two sizes."""
    value_dim = getattr(layer, "v_head_dim", None)
    return bool(value_dim != getattr(layer, "qk_head_dim", value_dim))


_FOUND: dict[tuple[str, str], str | None] = {}
"""What was found of an attention and a configuration."""


def why_not_without_mask(config: PretrainedConfig) -> str | None:
    """Say why a model does not attend within documents alone if there is no mask; None: it does.

    A small model of the configuration is tried, once in a process.
    """
    return _why_not_the_same(config, BY_DOCUMENT)


def why_not_tiled(config: PretrainedConfig) -> str | None:
    """Say what of a model attention by tiles cannot do; None: it can do it.

    A small model of the configuration is tried, once in a process.
    """
    return dropout_of(config) or _why_not_the_same(config, TILED)


def require_tiles(config: PretrainedConfig) -> None:
    """Refuse attention by tiles that was asked for by name, where it cannot do a model.

    Raises:
        ConfigError: It cannot; the sentence says what to do.
    """
    reason = why_not_tiled(config)
    if reason is not None:
        raise ConfigError(f"model.attn_implementation={TILED} cannot do {reason}; use sdpa, or leave it out")


def _why_not_the_same(config: PretrainedConfig, attention: str) -> str | None:
    """Say why a model does not give without a mask what it gives with one; None: it does."""
    key = attention, json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in _FOUND:
        name = config.get_text_config().model_type
        try:
            is_same = try_small_model(config, partial(_gives_the_same, attention))
            _FOUND[key] = None if is_same else f"what the {name} model does in its layers"
        except ModelError as error:
            _FOUND[key] = f"what the {name} model does in its layers ({first_line(error)})"
    return _FOUND[key]


def _gives_the_same(attention: str, model: PreTrainedModel) -> bool:
    """Whether packed rows have the same logits with a mask as without one."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in _LENGTHS])
    ids = torch.arange(positions.numel()).view(positions.shape) * 7 % 100 + 5
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    packed = Packed(is_packed=True, shape=(positions.shape[0], positions.shape[1]))
    with torch.no_grad():
        set_attention(model, "eager")
        expected = model(**given).logits
        set_attention(model, attention)
        told = {} if attention == TILED else told_of(positions)
        with documents(packed):
            logits = model(**given, **told).logits
    return torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def has_varlen(device: torch.device) -> bool:
    """Whether torch has variable-length attention for a device."""
    try:
        varlen.kernel()
    except ImportError:
        return False
    key = torch._C._dispatch_key_for_device(device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_KERNEL, key):
        return False
    if device.type != "cuda":
        return True
    capability = vendor_of(device).capability(device)  # of ROCm's kernel it is not known
    return capability is not None and capability >= _LEAST_CAPABILITY


def require_able(model: PreTrainedModel, device: torch.device, *, repeats: bool) -> None:
    """Refuse attention of ours that was asked for by name, where it cannot be.

    Args:
        model: The model, which may attend in another way.
        device: The device on which it computes.
        repeats: A claim that every operation gives the same bits in every run.

    Raises:
        ConfigError: It cannot be; the sentence says what to do.
    """
    name = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if name == FLEX:
        require_name(name, device.type)
    if name == TILED:
        require_tiles(model.config)
    if name == BY_DOCUMENT and device.type != "cpu":
        raise ConfigError(
            f"model.attn_implementation={BY_DOCUMENT} is for the CPU, and the device is {device.type}; use "
            f"{VARLEN}, or leave it out"
        )
    if name != VARLEN:
        return
    reason: str | None = None
    if not has_varlen(device):
        reason = f"run on {device.type} with this torch"
    elif repeats:
        reason = "be held to give the same bits in every run (train.deterministic)"
    elif (unable := why_not(model.config, model.dtype)) is not None:
        reason = f"do {unable}"
    if reason is not None:
        other = f"{BY_DOCUMENT} or sdpa" if device.type == "cpu" else "sdpa"
        raise ConfigError(f"model.attn_implementation={VARLEN} cannot {reason}; use {other}")
