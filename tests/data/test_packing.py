"""Packing: no token is lost but those counted, and none is changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data.packing import pack, tokenize
from megatrain.data.text import read_texts
from megatrain.data.tokenizer import end_of_document, load_tokenizer, train_tokenizer
from megatrain.errors import DataError

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def test_windows_are_the_joined_documents_cut_to_length() -> None:
    packed = pack([[1, 2, 0], [3, 0], [4, 5, 6, 0]], 4)
    assert packed.windows.tolist() == [[1, 2, 0, 3], [0, 4, 5, 6]]
    assert packed.windows.dtype == np.int32
    assert (packed.num_documents, packed.num_tokens, packed.num_dropped_tokens, packed.max_id) == (3, 9, 1, 6)
    assert packed.describe() == "3 documents, 9 tokens, 2 sequences of 4 (1 token at the end cut)"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1))), st.integers(1, 9))
def test_packing_keeps_every_token_in_order(documents: list[list[int]], seq_len: int) -> None:
    joined = [token for document in documents for token in document]
    if len(joined) < seq_len:
        with pytest.raises(DataError, match=rf"{len(joined)} tokens, too few .* data\.seq_len {seq_len};"):
            pack(documents, seq_len)
        return
    packed = pack(documents, seq_len)
    assert packed.windows.ravel().tolist() == joined[: len(joined) // seq_len * seq_len]
    assert packed.num_dropped_tokens == len(joined) % seq_len


def test_each_document_ends_once() -> None:
    tokenizer = train_tokenizer(["ab"], 257)
    end = end_of_document(tokenizer)
    a, b = tokenizer("ab")["input_ids"]
    documents = list(tokenize(iter(["ab", "b", "a<|endoftext|>"]), tokenizer, end_id=end))
    assert [list(ids) for ids in documents] == [[a, b, end], [b, end], [a, end]]


def test_document_beyond_the_context_is_tokenised_whole_and_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = train_tokenizer(["ab"], 257)
    tokenizer.model_max_length = 4
    (ids,) = tokenize(["ab" * 100], tokenizer, end_id=0)
    assert len(ids) == 201
    assert caplog.records == []


def test_real_text_packs_without_loss() -> None:
    text, model = SHARED / "text" / "tinyshakespeare.txt", SHARED / "stories260K" / "hf"
    if not (text.exists() and model.exists()):
        pytest.skip("needs tinyshakespeare and stories260K in shared/data next to the repository")
    tokenizer = load_tokenizer(str(model))
    documents = (document.text for document in read_texts([str(text)]))
    packed = pack(tokenize(documents, tokenizer, end_id=end_of_document(tokenizer)), 512)
    assert (packed.num_documents, packed.num_tokens, packed.windows.shape) == (1, 693_365, (1354, 512))
    assert packed.num_dropped_tokens == 117
    decoded = tokenizer.decode(packed.windows.ravel().tolist(), skip_special_tokens=True)
    assert text.read_text(encoding="utf-8").startswith(decoded.strip())
