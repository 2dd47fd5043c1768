"""Documents to equal windows of tokens: tokenised, ended by the end-of-document token, joined, cut to length.

A window may hold several documents and the end of one: nothing is padded, so every token is a real one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DOCUMENTS_PER_CALL = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWindows:
    """Windows of tokens, and what became of the text."""

    windows: NDArray[np.int32]
    """(num_windows, seq_len)."""
    num_documents: int
    num_tokens: int
    """All tokens of the documents, their ends included."""

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens after the last whole window."""
        return self.num_tokens - self.windows.size

    @property
    def max_id(self) -> int:
        """Largest token id."""
        return int(self.windows.max())

    def describe(self) -> str:
        """Return the counts as one line."""
        num_windows, seq_len = self.windows.shape
        return (
            f"{_number(self.num_documents, 'document')}, {_number(self.num_tokens, 'token')}, "
            f"{_number(num_windows, 'sequence')} of {seq_len:,} "
            f"({_number(self.num_dropped_tokens, 'token')} at the end cut)"
        )


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def tokenize(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, end_id: int
) -> Iterator[Sequence[int]]:
    """Yield each text's token ids with the special tokens the tokenizer adds itself, and `end_id` last."""
    remaining = iter(texts)
    while batch := list(islice(remaining, _DOCUMENTS_PER_CALL)):
        # verbose=False: text longer than the model's context is expected here, since windows are cut from it.
        encoded: Any = tokenizer(
            batch, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        for ids in encoded["input_ids"]:
            yield ids if ids and ids[-1] == end_id else [*ids, end_id]


def pack(documents: Iterable[Sequence[int]], seq_len: int) -> PackedWindows:
    """Join documents of token ids and cut them into windows; the last partial window is dropped.

    Raises:
        DataError: not enough tokens for one window.
    """
    tokens, num_documents = array("i"), 0
    for ids in documents:
        tokens.extend(ids)
        num_documents += 1
    num_windows = len(tokens) // seq_len
    if num_windows == 0:
        raise DataError(
            f"the data has {len(tokens)} tokens, too few for one sequence of data.seq_len {seq_len}; "
            "add text or lower data.seq_len"
        )
    flat: NDArray[np.int32] = np.frombuffer(tokens, dtype=np.int32)
    windows = flat[: num_windows * seq_len].reshape(num_windows, seq_len)
    return PackedWindows(windows=windows, num_documents=num_documents, num_tokens=len(tokens))
