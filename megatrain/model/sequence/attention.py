"""Attention over rows whose tokens are shared out, through transformers' registry of attention functions.

A model's layers ask `AttentionInterface` for their attention function, whatever it is: the answer is wrapped,
so that tokens and heads change places before it and after it. Masks are made by functions that the model's
file imports from `masking_utils`. They see shards as rows of their own, and where a row is packed they would
tell documents apart by the positions of a shard; so they too are wrapped, and given whole rows.

Which calls belong to whom is known by the configuration, which attention and masks are both given: other
models in the process, and this one while nothing is shared out, go on as they are.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

from megatrain.errors import ConfigError, ModelError
from megatrain.model.sequence.shards import Shards, gather, swap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""Tensors that models hand down to attention, which does not look at them."""


class SharedRows:
    """A model's rows, and who shares them out while `is_active`."""

    def __init__(self, shards: Shards, model_type: str, note: Callable[[int], object]) -> None:
        """Share out nothing yet."""
        self.shards = shards
        self.number, self.index = shards.number, shards.index
        self.model_type = model_type
        self._note = note
        self.is_active = False
        self.num_calls = 0
        """The calls of attention while rows were shared out."""

    @property
    def parts(self) -> int:
        """The number of parts in which rows are now."""
        return self.number if self.is_active else 1

    def swap(self, parts: Tensor) -> Tensor:
        """Give every shard its part, as `Shards`."""
        self._note(parts.nbytes - parts[0].nbytes)
        return self.shards.swap(parts)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let calls of the model be of shards."""
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False


_MARK = "shares_rows"
"""The attribute that marks a function which was put in the place of transformers'."""

_shared: dict[int, SharedRows] = {}
"""The rows that are shared out, by the id of a configuration."""
_replaced: list[tuple[Any, str, Any]] = []
"""The functions that were there before: (owner, name, function)."""


@contextmanager
def rows_shared(
    model: PreTrainedModel, shards: Shards, note: Callable[[int], object] = lambda _: None
) -> Iterator[SharedRows]:
    """Let a model share out its rows wherever the result is active.

    Args:
        model: The model, which is not changed.
        shards: The shards, which say who has the tokens.
        note: The function that is told of the bytes that this shard gives to others.
    """
    rows = SharedRows(shards, model.config.get_text_config().model_type, note)
    found = [config for module in model.modules() if (config := getattr(module, "config", None))]
    configs = {id(config): config for config in found}  # held, so that no other gets the id of one
    before = {name: _shared[name] for name in configs.keys() & _shared.keys()}
    if not hasattr(AttentionInterface.get_interface, _MARK):
        _replace(AttentionInterface, "get_interface", _sharing(AttentionInterface.get_interface))
    for module in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, make in _mask_makers(module).items():
            _replace(module, name, _whole_masks(make))
    _shared.update(dict.fromkeys(configs, rows))
    try:
        yield rows
    finally:
        for number in configs:
            if _shared.get(number) is rows:
                del _shared[number]
                if number in before:
                    _shared[number] = before[number]
        if not _shared:
            while _replaced:
                setattr(*_replaced.pop())


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(function, _MARK, True)
    setattr(owner, name, function)


def _mask_makers(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions by which a model's file makes masks, as it imports them."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == masking_utils.__name__
        and function.__name__.startswith("create_")
        and not hasattr(function, _MARK)
    }


def are_rows_shared(config: Any) -> bool:
    """Whether ranks share out the rows that a module of this configuration is called with now."""
    return _rows_of(config) is not None


def _rows_of(config: Any) -> SharedRows | None:
    rows = _shared.get(id(config))
    return rows if rows is not None and rows.is_active else None


# -- attention ---------------------------------------------------------------------------------------------


def _sharing(get_interface: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_interface)
    def get(self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]) -> Any:
        inner = get_interface(self, attn_implementation, default)
        if not any(rows.is_active for rows in _shared.values()):
            return inner
        return partial(_attend, inner, "flash" in (attn_implementation or ""))

    return get


def _attend(
    inner: Callable[..., Any],
    reads_positions: bool,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **given: Any,
) -> Any:
    """Run an attention function on all tokens, for a part of the heads.

    Args:
        inner: The model's own attention function.
        reads_positions: A claim that the function learns from positions where documents begin.
        module: The module of the attention.
        query: The queries, (B, heads, T / S, D), with positions applied.
        key: The keys, (B, key heads, T / S, D).
        value: The values, in the form of `key`.
        attention_mask: The mask of whole rows.
        given: The other arguments that the model passes.
    """
    rows = _rows_of(getattr(module, "config", None))
    if rows is None:
        return inner(module, query, key, value, attention_mask, **given)
    rows.num_calls += 1
    check_heads(rows.model_type, query.shape[1], key.shape[1], rows.number)
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.ndim and name not in ("position_ids", *_OF_LOSS):
            raise ModelError(
                f"the {rows.model_type} model gives its attention {name}, which cannot be cut into shards of "
                "rows; use parallel.sequence=1"
            )
    positions = given.get("position_ids")
    if reads_positions and positions is not None:
        given["position_ids"] = gather(positions, rows)
    query, key, value = (swap(each, rows, split=1, join=2) for each in (query, key, value))
    output, _ = inner(module, query, key, value, attention_mask, **given)
    return swap(output, rows, split=1, join=2), None


def check_heads(model_type: str, num_heads: int, num_key_heads: int, number: int) -> None:
    """Refuse heads that shards cannot share out.

    Raises:
        ConfigError: Their number does not divide both of these.
    """
    common = math.gcd(num_heads, num_key_heads)
    if common % number == 0:
        return
    most = common & -common
    allowed = ", ".join(str(1 << n) for n in range(most.bit_length()))
    of_keys = "" if num_heads == num_key_heads else f" and {num_key_heads} of keys and values"
    raise ConfigError(
        f"parallel.sequence is {number}, but the {model_type} model has {num_heads} attention heads{of_keys}"
        f", which {number} ranks cannot share out; use {'one of ' * (most > 1)}{allowed}"
    )


# -- masks ---------------------------------------------------------------------------------------------------


def _whole_masks(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that makes masks make those of whole rows."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def mask(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        rows = _rows_of(given.get("config"))
        if rows is None:
            return make(*args, **kwargs)
        for name, value in given.items():
            if value is None or name in ("config", "layer_idx") or isinstance(value, bool):
                continue
            if name in ("inputs_embeds", "input_embeds"):  # of which only the shape and the dtype are read
                length = value.shape[1] * rows.number
                given[name] = value[:, :1].expand(-1, length, *value.shape[2:])
            elif name in ("attention_mask", "position_ids") and value.ndim == 2:
                given[name] = gather(value, rows)
            else:
                raise ModelError(
                    f"the {rows.model_type} model makes attention masks of its own ({name}), which cannot be "
                    "made for shards of rows; use parallel.sequence=1"
                )
        return make(**given)

    return mask
