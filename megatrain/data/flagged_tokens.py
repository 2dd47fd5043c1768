"""Tokens as they are cached and packed: a token id and its flags in one int32."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

TRAINED: Final = 1 << 30
"""The model is trained to predict this token."""
START: Final = 1 << 29
"""The first token of a document, or of a piece of one, which is not predicted and sees nothing before it."""
GOOD: Final = 1 << 28
"""The flag on the first token of an answer that is marked good."""
IDS: Final = GOOD - 1
"""The bits of the token id."""

Words = NDArray[np.int32]


def join_words(ids: NDArray[np.integer], trained: NDArray[np.bool_]) -> Words:
    """Return a document's tokens with their flags; the first is never trained, since nothing predicts it."""
    words = ids.astype(np.int32)
    words[trained] |= TRAINED
    if len(words):
        words[0] = (words[0] & IDS) | START
    return words


def num_trained(words: Words) -> int:
    """Count the tokens that are trained on."""
    return int(np.count_nonzero(words & TRAINED))


def num_present(rows: Words) -> int:
    """Count the tokens of packed rows that belong to a document, and are no filling.

    Args:
        rows: The rows, (B, T); the filling of a row is its last piece, the only one without a trained token.
    """
    length = rows.shape[-1]
    last_start, last_trained = (
        length - np.argmax((rows & flag != 0)[:, ::-1], axis=-1) for flag in (START, TRAINED)
    )
    return int(np.where(last_trained > last_start, length, last_start - 1).sum())


def split_words(words: Words) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids, labels and positions of rows of words, each of their shape.

    Args:
        words: The rows, (B, T); each begins with a START.

    Returns:
        `input_ids`, `labels` (-100 where not trained) and `position_ids`, which begin at 0 with every START.
    """
    ids = (words & IDS).astype(np.int64)
    labels = np.where(words & TRAINED, ids, -100)
    places = np.broadcast_to(np.arange(words.shape[-1], dtype=np.int64), words.shape)
    starts = np.maximum.accumulate(np.where(words & START, places, 0), axis=-1)
    return ids, labels, places - starts
