"""Published tokenizers from beside the repository, read once in a process; nothing may change them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[3].parent / "shared" / "data" / "tokenizers"
needs_tokenizers = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="needs the tokenizers in shared/data next to the repository"
)


@cache
def published(name: str) -> Any:
    """Return a tokenizer of the folder."""
    return load_tokenizer(str(FOLDER / name))
