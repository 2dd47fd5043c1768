"""How long a tile of tokens is: it follows from the length of rows alone, since results depend on it."""

from __future__ import annotations

LONGEST_WHOLE = 131_072
"""Longer rows, in tokens, pass position-wise modules in tiles, unless it is set otherwise."""

TILE = 4_096
"""Tokens of a tile."""


def tile_of(seq_len: int, setting: int | None = None) -> int:
    """Return the tokens of a tile; 0: rows pass whole.

    Args:
        seq_len: The tokens of a row.
        setting: `train.tile_tokens`, where it is given: the tokens of a tile, or 0 for none.
    """
    wanted = (TILE if seq_len > LONGEST_WHOLE else 0) if setting is None else setting
    return wanted if wanted < seq_len else 0
