"""Packing: no token is lost but those counted, none is changed, and none sees another document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data.flagged_tokens import IDS, START, TRAINED, Words, join_words, split_words
from megatrain.data.packing import BestFit, Joining, OnePerRow, best_fit, split_long
from megatrain.data.tokenizer import end_of_document, load_tokenizer, train_tokenizer
from tests.data.documents import join_documents, read_texts, tokenize

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def words_of(ids: list[int], first_trained: int = 1) -> Words:
    return join_words(np.array(ids), np.arange(len(ids)) >= first_trained)


def rows_of(packer: Joining | BestFit, documents: list[Words]) -> list[list[int]]:
    parts = [rows for words in documents for rows in packer.add(words)] + list(packer.finish())
    return np.concatenate(parts).tolist() if parts else []


def test_joined_rows_are_the_documents_cut_to_length() -> None:
    rows = join_documents([[1, 2, 0], [3, 0], [4, 5, 6, 0]], 4)
    assert rows.tolist() == [[1, 2, 0, 3], [0, 4, 5, 6]]
    assert rows.dtype == np.int32


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**28))), st.integers(1, 9))
def test_joining_keeps_every_token_in_order(documents: list[list[int]], seq_len: int) -> None:
    joined = [token for document in documents for token in document]
    rows = join_documents(documents, seq_len)
    assert rows.ravel().tolist() == joined[: len(joined) // seq_len * seq_len]


def test_joining_gives_the_same_rows_whatever_it_holds_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [list(range(n, 2 * n + 1)) for n in range(30)]
    whole = join_documents(documents, 7)
    monkeypatch.setattr("megatrain.data.packing._TOKENS_AT_ONCE", 8)
    assert join_documents(documents, 7).tolist() == whole.tolist()


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


def test_real_text_joins_without_loss(tmp_path: Path) -> None:
    text, model = SHARED / "text" / "tinyshakespeare.txt", SHARED / "stories260K" / "hf"
    if not (text.exists() and model.exists()):
        pytest.skip("needs tinyshakespeare and stories260K in shared/data next to the repository")
    tokenizer = load_tokenizer(str(model))
    beginning = tmp_path / "beginning.txt"
    beginning.write_text(text.read_text(encoding="utf-8")[:250_000], encoding="utf-8")
    texts = (document.text for document in read_texts([str(beginning)]))
    documents = list(tokenize(texts, tokenizer, end_id=end_of_document(tokenizer)))
    rows = join_documents(documents, 512)
    assert (len(documents), sum(map(len, documents)), rows.shape) == (1, 155_540, (303, 512))
    decoded = tokenizer.decode(rows.ravel().tolist(), skip_special_tokens=True)
    assert beginning.read_text(encoding="utf-8").startswith(decoded.strip())


# -- documents apart -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "room", "expected"),
    [
        ([3, 7, 5, 5, 2], 10, [[0, 1], [2, 3], [4]]),
        ([10, 10], 10, [[0], [1]]),
        ([1, 4, 9, 6], 10, [[0, 2], [1, 3]]),  # 1 goes to the row of 9, which it fills
        ([6, 6, 2, 3], 10, [[0, 2], [1, 3]]),  # 3, and then the fuller row has no room for 2
        ([], 10, []),
    ],
)
def test_best_fit_takes_the_fullest_row_with_room(
    lengths: list[int], room: int, expected: list[list[int]]
) -> None:
    assert best_fit(lengths, room) == expected


@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_packs_each_once_and_never_wastes_a_row(lengths: list[int]) -> None:
    rows = best_fit(lengths, 20)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert all(total <= 20 for total in filled)
    assert sum(total <= 10 for total in filled) <= 1  # two half empty rows would be one


def test_packed_rows_say_where_documents_begin() -> None:
    documents = [words_of([11, 12, 13]), words_of([21, 22]), words_of([31, 32, 33, 34], first_trained=2)]
    packer = BestFit(6, fill_id=9)
    rows = np.array(rows_of(packer, documents), dtype=np.int32)
    ids, labels, positions = split_words(rows)
    assert ids.tolist() == [[11, 12, 13, 9, 9, 9], [21, 22, 31, 32, 33, 34]]
    assert labels.tolist() == [[-100, 12, 13, -100, -100, -100], [-100, 22, -100, -100, 33, 34]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]
    assert packer.num_filled == 3


def test_packing_arranges_no_more_than_it_may_hold() -> None:
    packer = BestFit(4, fill_id=0, tokens_at_once=6)
    documents = [words_of([n] * 3) for n in range(1, 6)]
    sizes = [len(rows) for words in documents for rows in packer.add(words)]
    assert sizes == [1, 1, 1, 1], "of two rows at a time, the second waits for more"
    assert [len(rows) for rows in packer.finish()] == [1]


def test_one_example_per_row() -> None:
    rows = np.array(rows_of(OnePerRow(4, fill_id=9), [words_of([1, 2]), words_of([3])]), dtype=np.int32)
    assert (rows & IDS).tolist() == [[1, 2, 9, 9], [3, 9, 9, 9]]


@pytest.mark.parametrize(
    ("way", "ids", "trained", "num_cut"),
    [
        ("split", [[1, 2, 3], [4, 5, 6], [7, 8]], [[2, 3], [5, 6], [8]], 0),
        ("truncate", [[1, 2, 3]], [[2, 3]], 5),
        ("drop", [], [], 8),
    ],
)
def test_long_document_is_split_truncated_or_dropped(
    way: str, ids: list[list[int]], trained: list[list[int]], num_cut: int
) -> None:
    words = words_of([1, 2, 3, 4, 5, 6, 7, 8])
    before = words.copy()
    pieces, cut = split_long(words, 3, way)
    assert [(piece & IDS).tolist() for piece in pieces] == ids
    assert [(piece[piece & TRAINED != 0] & IDS).tolist() for piece in pieces] == trained
    assert all(piece[0] & START for piece in pieces)
    assert cut == num_cut
    assert np.array_equal(words, before)


def test_pieces_without_a_token_to_train_on_are_left_out() -> None:
    pieces, cut = split_long(words_of([1, 2, 3, 4, 5, 6, 7], first_trained=4), 3, "split")
    assert [(piece & IDS).tolist() for piece in pieces] == [[4, 5, 6]]  # 7 begins a piece and has no past
    assert cut == 4
    assert split_long(words_of([1, 2, 3], first_trained=3), 3, "truncate") == ([], 3)
