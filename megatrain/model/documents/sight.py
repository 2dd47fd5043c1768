"""What tokens see, said in a few numbers in the place of a mask.

transformers makes every mask of a rule, a function of two places that is put together of a few kinds of
functions. Where it is of kinds that are known here, it is told again as what tiles need: the causal order, a
window, where documents begin, which tokens are there. Of any other rule nothing is said, and it needs a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils

from megatrain.model.documents.begins import packed_now, places_of


@dataclass(frozen=True, eq=False)
class Sight:
    """What the tokens of rows see. A model hands it to its attention function as it would a mask."""

    window: int | None
    """The tokens that a token sees at most, itself among them; None: all before it."""
    starts: Tensor | None = field(default=None, repr=False)
    """The places where documents begin, over all rows in one, and the end, several times so that compiled
    code sees few lengths of it: (n,) int64, on the host. None: a row is one document."""
    present: Tensor | None = field(default=None, repr=False)
    """(B, S), which tokens are there; None: all of them."""


@dataclass(frozen=True)
class _Rule:
    """A rule of masks: tokens see what is before them, but."""

    window: int | None = None
    chunk: int | None = None
    """Only tokens of the same chunk, of so many."""
    positions: Tensor | None = None
    """(B, T), positions that begin anew with each document; None: a row is one document."""


def sight_of(given: dict[str, Any]) -> Sight | None:
    """Say what tokens see by the arguments of a function that makes masks; None: a mask has to say it."""
    queries, keys, padding = given["q_length"], given["kv_length"], given.get("attention_mask")
    offset, key_offset = given.get("q_offset", 0), given.get("kv_offset", 0)
    mask_function = given.get("mask_function", masking_utils.causal_mask_function)
    # a rule that has been put in another one's place says which
    rule = _read(getattr(mask_function, "stands_for", mask_function))
    if rule is None or not isinstance(offset, int) or offset + queries != key_offset + keys:
        return None  # the queries are not the last tokens
    if rule.chunk is not None and (padding is not None or offset):
        return None
    window = rule.window if rule.window is not None and rule.window < keys else None
    begins = None
    if rule.positions is not None or (rule.chunk is not None and rule.chunk < keys):
        if queries != keys:
            return None
        begins = _begins(rule, given["batch_size"], keys)
    present = None
    if padding is not None and not _is_full(padding):
        present = masking_utils.prepare_padding_mask(padding, keys, key_offset)[:, key_offset:][:, :keys]
    return Sight(window, None if begins is None else _starts(begins), present)


def _is_full(padding: Tensor) -> bool:
    """Whether a mask of padding leaves no token out; it may be read from the device for that."""
    return bool(masking_utils.fast_all(padding))


def _begins(rule: _Rule, num_rows: int, num_tokens: int) -> NDArray[np.bool_]:
    """Return where documents begin, and chunks of them: (B, T)."""
    shape = num_rows, num_tokens
    begins, places = np.zeros(shape, dtype=bool), np.broadcast_to(np.arange(num_tokens), shape)
    if rule.positions is not None:
        packed = packed_now()
        known = None if packed is None else packed.positions
        if known is not None and known.shape == shape:
            places = known
        elif not isinstance(rule.positions, FakeTensor):  # of a fake row nobody knows more than its length
            places = rule.positions.detach().cpu().numpy()
        begins[:, 1:] = np.diff(places, axis=1) != 1
    begins[:, 0] = True
    return begins if rule.chunk is None else begins | (places % rule.chunk == 0)


def _starts(begins: NDArray[np.bool_]) -> Tensor:
    with _disable_current_modes():  # a real tensor where others are fake
        return torch.from_numpy(places_of(begins, is_padded=True))


def _read(rule: Callable[..., Any]) -> _Rule | None:
    """Read a rule; None: it is not known."""
    parts = _parts(rule)
    if len(parts) == 2 and _kind(parts[1]) == "packed_sequence_mask_function":
        if _kind(parts[0]) != "remap_positions_for_packed_sequence":
            return None
        held = _held(parts[0])
        # within a document positions are as far apart as places, and it alone is seen
        found = _read(held["mask_function"])
        return None if found is None else replace(found, positions=held["position_ids"])
    if not parts or parts[-1] is not masking_utils.causal_mask_function:
        return None
    match [_kind(part) for part in parts[:-1]]:
        case []:
            return _Rule()
        case ["sliding_window_overlay"]:
            return _Rule(window=_held(parts[0])["sliding_window"])
        case ["chunked_overlay"]:
            return _Rule(chunk=_held(parts[0])["chunk_size"])
        case _:
            return None


def _parts(rule: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
    """Return the functions that a rule is the conjunction of."""
    if _kind(rule) != "and_masks":
        return [rule]
    parts: Sequence[Callable[..., Any]] = _held(rule)["mask_functions"]
    return parts


def _kind(rule: Callable[..., Any]) -> str:
    """Return the name of the function of `masking_utils` that has made a rule; empty: none has."""
    maker, _, inner = getattr(rule, "__qualname__", "").partition(".<locals>.")
    is_made = inner and getattr(rule, "__module__", "") == masking_utils.__name__
    return maker if is_made else ""


def _held(rule: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function has closed over, by name."""
    variables = inspect.getclosurevars(rule).nonlocals
    return dict(variables)
