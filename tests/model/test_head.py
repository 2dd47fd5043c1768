"""The tokens of a chunk of the head."""

import pytest
from transformers import LlamaConfig

from megatrain.model.head import chunk_tokens_of


@pytest.mark.parametrize(
    ("vocab_size", "tokens"),
    [(128_256, 1_024), (151_936, 768), (262_144, 512), (32_000, 4_096), (1 << 20, 128), (64, 1 << 21)],
)
def test_an_automatic_chunk_is_whole_tiles_of_tokens(vocab_size: int, tokens: int) -> None:
    """At most half a GiB of fp32 logits; fewer tokens than a tile are taken as they are."""
    assert chunk_tokens_of(LlamaConfig(vocab_size=vocab_size)) == tokens
    assert tokens * vocab_size * 4 <= 1 << 29
