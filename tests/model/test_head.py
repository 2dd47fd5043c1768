"""The tokens of a chunk of the head."""

import pytest
from transformers import LlamaConfig

from megatrain.model.head.head import chunk_tokens_of


@pytest.mark.parametrize(
    ("vocab_size", "tokens"),
    [(128_256, 2_048), (151_936, 1_536), (262_144, 1_024), (32_000, 8_192), (1 << 21, 128), (64, 1 << 22)],
)
def test_an_automatic_chunk_is_whole_tiles_of_tokens(vocab_size: int, tokens: int) -> None:
    """At most a GiB of fp32 logits; fewer tokens than a tile are taken as they are."""
    assert chunk_tokens_of(LlamaConfig(vocab_size=vocab_size)) == tokens
    assert tokens * vocab_size * 4 <= 1 << 30
