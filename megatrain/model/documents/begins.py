"""Reads on the host where documents begin in a micro-batch's rows, before positions go to the device.

transformers reads this back from the device, which answers only when all work launched before is done: once
for each mask, and under flash attention in every layer; so it does with whether a mask of padding leaves
anything out. Flash attention also reads it of a single row only:
in a micro-batch of several rows, documents of one row would see each other. So the makers of masks are told
whether there are documents, and flash attention is told where each begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from megatrain.config.attention import BY_DOCUMENT, TILED, VARLEN
from megatrain.errors import ConfigError, ModelError
from megatrain.model.small import try_small_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The arguments of a model and its layers that tell flash attention where documents begin."""

_FEWEST_DOCUMENTS, _TOKENS_PER_DOCUMENT = 16, 256
"""Places for documents: at least so many, and one for so many tokens. They are doubled until all have one."""

_CACHES = ("past_key_values", "cache")
"""The names that models give to keys and values of tokens before these: transformers renames it in 5.24."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """The rows of a forward, which hold several documents or one each."""

    is_packed: bool | None
    """Whether a row holds several documents; None: nobody has looked."""
    shape: tuple[int, int] | None = None
    """The shape of their positions, or mask: rows, tokens. Nothing is known of other shapes; None: of any."""
    is_full: bool | None = None
    """Whether a mask of padding leaves no token out; None: nobody has looked."""
    positions: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    """The positions of rows that hold several documents; None: nobody has them on the host."""


_now: ContextVar[Packed | None] = ContextVar("_now", default=None)
"""The rows of the forward that is running; None: nothing is known of them."""


def is_flash(config: PretrainedConfig) -> bool:
    """Whether a model attends by a package for flash attention, which makes no masks."""
    return "flash" in (getattr(config.get_text_config(), "_attn_implementation", None) or "")


def packed_now() -> Packed | None:
    """Return what is known of the rows of the forward that is running; None: nothing."""
    return _now.get()


def is_ours(config: PretrainedConfig) -> bool:
    """Whether a model attends by a function of ours, which needs no mask for packed rows."""
    return getattr(config.get_text_config(), "_attn_implementation", None) in (VARLEN, BY_DOCUMENT)


def is_tiled(config: PretrainedConfig) -> bool:
    """Whether a model attends by tiles of queries and keys."""
    return getattr(config.get_text_config(), "_attn_implementation", None) == TILED


def read_documents(
    config: PretrainedConfig, args: Sequence[Any], kwargs: Mapping[str, Any], part: int | None = None
) -> tuple[Packed | None, dict[str, Any]]:
    """Read where documents begin from the arguments of a forward, while they are on the host.

    Positions that are on the device already are read from there only where flash attention has to be told.

    Args:
        config: The model's configuration.
        args: Positional arguments; the first holds tokens.
        kwargs: The forward's arguments by name.
        part: Rows are shared out, and these are the parts of this number; None: whole rows.

    Returns:
        The rows, None if it is not known whether they are packed; and what else the forward has to be given.

    Raises:
        ConfigError: Documents in one row would see each other.
    """
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if len(args) > 1 or any(kwargs.get(name) is not None for name in _CACHES):
        return None, {}
    # with a cache, even an empty one, transformers does not read from positions where documents begin
    told: dict[str, Any] = {} if positions is None else {"use_cache": False}
    flash = is_flash(config)
    if part is not None:
        if flash and positions is not None:
            require_one_row(positions, part)
        return None, told  # masks are made of whole rows
    if mask is not None:
        if flash or not isinstance(mask, Tensor) or mask.ndim != 2 or mask.device.type != "cpu":
            return None, told
        is_full = bool(mask.detach().float().numpy().all())
        return Packed(is_packed=None, shape=(mask.shape[0], mask.shape[1]), is_full=is_full), told
    if positions is None:
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None or tokens.ndim < 2:
            return None, told
        return Packed(is_packed=False, shape=(tokens.shape[0], tokens.shape[1])), told
    is_told, ours = all(kwargs.get(name) is not None for name in _ARGUMENTS), is_ours(config)
    if positions.ndim != 2 or is_told or not (flash or ours or positions.device.type == "cpu"):
        return None, told
    begins = _begins(positions)
    is_packed, shape = bool(begins[:, 1:].any()), (begins.shape[0], begins.shape[1])
    if (flash or ours) and is_packed:
        require_told(config)
        told |= _told(begins, is_padded=ours)
    own = positions.detach().cpu().numpy() if is_packed else None
    return Packed(is_packed=is_packed, shape=shape, positions=own), told


def require_one_row(positions: Tensor, part: int) -> None:
    """Refuse several rows that hold several documents each, where flash attention reads one row only.

    Args:
        positions: (B, T / S), of parts of rows that are shared out.
        part: The number of these.

    Raises:
        ConfigError: Several rows hold several documents each.
    """
    if positions.ndim != 2 or len(positions) == 1:
        return
    begins = _begins(positions)
    begins[:, 0] = positions[:, 0].cpu().numpy() != part * positions.shape[1]
    if begins.any():
        raise ConfigError(
            "flash attention under parallel.sequence keeps the documents of a single packed row apart, and a "
            f"micro-batch has {len(positions)} rows; use train.micro_batch_size=1, data.packing=pad, or "
            "model.attn_implementation=sdpa"
        )


def _begins(positions: Tensor) -> NDArray[np.bool_]:
    """Return where documents begin, (B, T); a row begins with one."""
    values = positions.detach().cpu().numpy()
    begins = np.ones(values.shape, dtype=bool)
    np.not_equal(np.diff(values, axis=1), 1, out=begins[:, 1:])
    return begins


def _told(begins: NDArray[np.bool_], *, is_padded: bool) -> dict[str, Any]:
    """Return the arguments that tell attention where documents begin, over all rows in one.

    Args:
        begins: (B, T), where documents begin.
        is_padded: Whether empty documents at the end fill up their number, and the longest length is rounded
            up to a quarter, a half or all of a row, so that compiled code sees few shapes and lengths.
    """
    places = places_of(begins, is_padded=is_padded).astype(np.int32)
    longest = int(np.diff(places).max())
    if is_padded:
        row = begins.shape[1]
        longest = next(part for part in (-(-row // 4), -(-row // 2), row) if part >= longest)
    starts = torch.from_numpy(places)
    return dict(zip(_ARGUMENTS, (starts, starts, longest, longest), strict=True))


def places_of(begins: NDArray[np.bool_], *, is_padded: bool) -> NDArray[np.int64]:
    """Return the places where documents begin, over all rows in one, and the end.

    Args:
        begins: (B, T), where documents begin.
        is_padded: Whether empty documents at the end fill up their number, so that compiled code sees few
            shapes.
    """
    places = np.append(np.flatnonzero(begins), begins.size)
    if not is_padded:
        return places
    number = max(_FEWEST_DOCUMENTS, begins.size // _TOKENS_PER_DOCUMENT)
    while number < len(places) - 1:
        number *= 2
    return np.pad(places, (0, number + 1 - len(places)), mode="edge")


def told_of(positions: Tensor) -> dict[str, Any]:
    """Return the arguments that tell attention of ours where documents begin, by the positions of rows."""
    return _told(_begins(positions), is_padded=True)


def told_of_equal(num_tokens: int, length: int) -> dict[str, Any]:
    """Return the arguments that tell attention of documents of one length, but for the last."""
    starts = torch.tensor([*range(0, num_tokens, length), num_tokens], dtype=torch.int32)
    return dict(zip(_ARGUMENTS, (starts, starts, length, length), strict=True))


@contextmanager
def documents(packed: Packed | None) -> Iterator[None]:
    """Let masks of the forward inside be made of what is known of its documents; None: as transformers does.

    It holds for the running coroutine, within `documents_known`.
    """
    token = _now.set(packed)
    try:
        yield
    finally:
        _now.reset(token)


_number_of_users = 0
_undo: list[tuple[str, Any]] = []
"""The functions of transformers that are replaced while anybody uses `documents_known`, by name."""


@contextmanager
def documents_known() -> Iterator[None]:
    """Let `documents` be heard by what makes masks in transformers; it may be used several times at once."""
    global _number_of_users
    if _number_of_users == 0:
        for name, replace in (("find_packed_sequence_indices", _find_by), ("fast_all", _all_by)):
            if (found := getattr(masking_utils, name, None)) is not None:
                _undo.append((name, found))
                setattr(masking_utils, name, replace(found))
    _number_of_users += 1
    try:
        yield
    finally:
        _number_of_users -= 1
        while _number_of_users == 0 and _undo:
            setattr(masking_utils, *_undo.pop())


def _find_by(find: Any) -> Any:
    @functools.wraps(find)
    def indices(position_ids: Tensor) -> Tensor | None:
        packed = _now.get()
        if packed is None or packed.is_packed is None or not _is_of(packed, position_ids):
            found: Tensor | None = find(position_ids)
            return found
        if not packed.is_packed:
            return None
        return position_ids.diff(prepend=position_ids[:, :1] - 1, dim=-1).ne(1).cumsum(-1)

    return indices


def _all_by(find: Any) -> Any:
    """Answer from the host whether all tokens of a mask of padding are there."""

    @functools.wraps(find)
    def are_all(mask: Tensor) -> Any:
        packed = _now.get()
        if packed is None or packed.is_full is None or not _is_of(packed, mask):
            return find(mask)
        return packed.is_full

    return are_all


def _is_of(packed: Packed, values: Tensor) -> bool:
    return packed.shape in (None, tuple(values.shape))


# -- whether a model hands on what flash attention has to be told --------------------------------------------


_HANDS_ON: dict[type, bool] = {}

_ASKED = "megatrain_asked"
"""An attention function, while a small model is asked."""


def require_told(config: PretrainedConfig) -> None:
    """Refuse a model that does not tell its attention function where documents begin.

    Raises:
        ConfigError: The model does not tell it; the sentence says what to do.
    """
    if not hands_on(config):
        raise ConfigError(
            f"{not_handed_on(config)}: documents in one row would see each other; use data.packing=pad, or "
            "model.attn_implementation=sdpa"
        )


def not_handed_on(config: PretrainedConfig) -> str:
    """Say why documents in one row would see each other without a mask."""
    name = "flash attention" if is_flash(config) else "its attention function"
    return f"the {config.get_text_config().model_type} model does not tell {name} where they begin"


def hands_on(config: PretrainedConfig) -> bool:
    """Whether a model hands on to its attention function, in every layer, where documents begin.

    A small model of the configuration is asked, once for each class of configurations.
    """
    kind = type(config)
    if kind not in _HANDS_ON:
        try:
            _HANDS_ON[kind] = try_small_model(config, _asked)
        except ModelError:
            _HANDS_ON[kind] = False
    return _HANDS_ON[kind]


_TELLS_WINDOWS: dict[type, bool] = {}


def tells_windows(config: PretrainedConfig) -> bool:
    """Whether a model tells its attention function, in every layer, of the window that a mask would have.

    A chunk is no window, and layers with a rule of their own are told of none. A small model of the
    configuration is asked, once for each class of configurations.
    """
    kind = type(config)
    if kind not in _TELLS_WINDOWS:
        try:
            _TELLS_WINDOWS[kind] = try_small_model(config, _asked_of_windows)
        except ModelError:
            _TELLS_WINDOWS[kind] = False
    return _TELLS_WINDOWS[kind]


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let every module of a model attend by the function of this name."""
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            config._attn_implementation = name


def _asked(model: PreTrainedModel) -> bool:
    told = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        told.append(all(given.get(name) is not None for name in _ARGUMENTS))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    _ask(model, attend, None)
    return bool(told) and all(told)


def _asked_of_windows(model: PreTrainedModel) -> bool:
    told: list[bool] = []

    def mask(**given: Any) -> Tensor:  # that of a window is known again by its size
        return torch.full((1, 1, 1, 1), given.get("local_size") or 0)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        window = given.get("sliding_window") or 0
        told.append(isinstance(mask, Tensor) and mask.numel() == 1 and int(mask) == window)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    _ask(model, attend, mask)
    return bool(told) and all(told)


def _ask(model: PreTrainedModel, attend: Any, mask: Any) -> None:
    """Run a small model on two rows, told of documents, with a function for attention and one for masks."""
    set_attention(model, _ASKED)
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)
    masks = {} if mask is None else {_ASKED: mask}
    with (
        mock.patch.dict(AttentionInterface._global_mapping, {_ASKED: attend}),
        mock.patch.dict(AttentionMaskInterface._global_mapping, masks),
        torch.no_grad(),
    ):
        model(
            input_ids=torch.full((2, 4), 5),
            position_ids=torch.arange(4).expand(2, -1),
            use_cache=False,
            **dict(zip(_ARGUMENTS, (starts, starts, 4, 4), strict=True)),
        )
