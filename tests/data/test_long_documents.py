"""Documents of up to a million tokens, from files to a resumed loader: exact, in linear time and memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatrain.config.sections.data import DataConfig
from megatrain.data.cache import RowFile
from megatrain.data.example import ChatExample, Message, Source, TextExample, TokensExample
from megatrain.data.flagged_tokens import IDS, START, TRAINED, split_words
from megatrain.data.loader import PackedLoader
from megatrain.data.packing import BestFit, Joining, OnePerRow, best_fit
from megatrain.data.prepare import Prepared
from megatrain.data.read import arrow_rows
from megatrain.data.read.examples import read_examples
from megatrain.data.tokenizer import train_tokenizer
from megatrain.data.tokens import processes
from megatrain.data.tokens.model_text import _ended
from megatrain.data.tokens.rendering import Piece, Rendered
from tests.cpu_seconds import spent_s
from tests.data.test_prepare import prepare

LONG, SHORT, NUM_SHORT = 1 << 19, 1 << 13, 70
DOCUMENTS = [SHORT] * 3 + [LONG] + [SHORT] * (NUM_SHORT - 3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["hello world and more\n"] * 9, 300)


def ids_of(number: int) -> list[int]:
    """Return the tokens of a document, which tell it from the others."""
    return ((np.arange(DOCUMENTS[number]) * 7 + number) % 250).tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One document of 524,288 tokens among 70 of 8,192, of which the first half of each is not trained on."""
    folder = tmp_path_factory.mktemp("long")
    rows = [
        {"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]}
        for ids in map(ids_of, range(len(DOCUMENTS)))
    ]
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return {"jsonl": folder / "rows.jsonl", "parquet": folder / "rows.parquet"}


def batches_of(prepared: Prepared, num: int) -> list[dict[str, Any]]:
    """Return micro-batches of one row, of which each second one is loaded after a resume."""

    def make() -> PackedLoader:
        return PackedLoader(
            prepared.rows,
            micro_batch_size=1,
            num_micro_batches=1,
            seed=0,
            shuffle=False,
            packing=prepared.packing,
            name=prepared.fingerprint,
        )

    loader, found = make(), []
    for _ in range(num):
        found += next(loader)
        state = json.loads(json.dumps(loader.state()))
        loader = make()
        loader.restore(state)
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_long_document_among_short_ones_is_packed_and_loaded_exactly(
    tokenizer: Any, files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Rows of 512k: the long document fills one, 64 short ones another, and the rest a third in part."""
    prepared = prepare(tokenizer, files[kind], tmp_path / "kept", seq_len=LONG, way="best_fit")
    again = prepare(tokenizer, files[kind], tmp_path / "kept", seq_len=LONG, way="best_fit")
    assert again.fingerprint == prepared.fingerprint
    assert prepared.rows.shape == (3, LONG)
    assert prepared.counts.tokens == LONG + NUM_SHORT * SHORT
    assert prepared.counts.longest == LONG
    assert prepared.counts.trained == (LONG + NUM_SHORT * SHORT) // 2
    seen: dict[int, tuple[list[int], list[int]]] = {}
    for batch in batches_of(prepared, 3):
        ids, labels, positions = (batch[name][0].numpy() for name in ("input_ids", "labels", "position_ids"))
        starts = np.flatnonzero(positions == 0)
        assert positions[1:][np.diff(positions) != 1].max(initial=0) == 0
        for start, end in zip(starts, [*starts[1:], LONG], strict=True):
            if end - start in (LONG, SHORT):
                number = 3 if end - start == LONG else int(ids[start])
                seen[number] = ids[start:end].tolist(), labels[start:end].tolist()
    assert sorted(seen) == list(range(len(DOCUMENTS)))
    for number, (ids_seen, labels_seen) in seen.items():
        expected = ids_of(number)
        half = len(expected) // 2
        assert ids_seen == expected
        assert labels_seen == [-100] * half + expected[half:]


def test_a_long_document_is_cut_into_windows_or_left_out(
    tokenizer: Any, files: dict[str, Path], tmp_path: Path
) -> None:
    """A window of 8k begins with a token that is not trained on, and at position 0."""
    cut = prepare(tokenizer, files["parquet"], seq_len=SHORT, way="best_fit", too_long="split")
    windows = LONG // SHORT // 2  # those of the first half have nothing to train on
    assert cut.rows.shape == (NUM_SHORT + windows, SHORT)
    rows = cut.rows[range(3, 3 + windows)]
    assert ((rows & IDS).reshape(-1) == ids_of(3)[LONG // 2 :]).all()
    assert ((rows & START != 0).nonzero()[1] == 0).all()
    assert (rows & TRAINED != 0).sum() == windows * (SHORT - 1)
    assert split_words(rows)[2].max() == SHORT - 1
    dropped = prepare(tokenizer, files["parquet"], seq_len=SHORT, way="best_fit", too_long="drop")
    assert (dropped.counts.too_long, dropped.rows.shape[0]) == (1, NUM_SHORT)
    pq.write_table(pq.read_table(files["parquet"]).slice(2, 3), tmp_path / "three.parquet")
    padded = prepare(tokenizer, tmp_path / "three.parquet", seq_len=LONG, way="pad")
    assert padded.rows.shape == (3, LONG)
    assert padded.counts.filled == 2 * (LONG - SHORT)


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
@pytest.mark.parametrize("num_tokens", [1 << 16, pytest.param(1 << 20, marks=pytest.mark.parity)])
def test_a_long_text_is_tokenised_whole(tokenizer: Any, tmp_path: Path, kind: str, num_tokens: int) -> None:
    text = "hello world and more\n" * (num_tokens // 8)
    file = tmp_path / f"long.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": [text]}), file)
    else:
        file.write_text(text if kind == "txt" else json.dumps({"text": text}) + "\n")
    expected = tokenizer(text, verbose=False)["input_ids"]
    packed = prepare(tokenizer, file, seq_len=len(expected) + 1, way="best_fit")
    assert len(expected) >= num_tokens // 2
    assert (packed.rows[[0]][0] & IDS).tolist() == [*expected, tokenizer.eos_token_id]
    joined = prepare(tokenizer, file, seq_len=len(expected) // 2, way="join")
    assert joined.rows[[0, 1]].reshape(-1).tolist() == expected[: len(expected) // 2 * 2]


# -- packing -------------------------------------------------------------------------------------------------


def test_rows_of_a_million_tokens_are_nearly_full() -> None:
    """What is left of some documents waits for more, where a row of few tokens would be one of five."""
    documents = [np.full(n, n, dtype=np.int32) for n in np.random.default_rng(0).integers(500, 9000, 4200)]
    packer, rows = BestFit(1 << 20, fill_id=0), []
    for words in documents:
        rows += [row for some in packer.add(words) for row in some]
    rows += [row for some in packer.finish() for row in some]
    total = sum(map(len, documents))
    assert len(rows) == -(-total // (1 << 20))
    assert packer.num_filled == len(rows) * (1 << 20) - total
    values = np.concatenate(rows)
    counts = np.bincount(values[values & START == 0], minlength=9000)
    expected = np.bincount([len(words) for words in documents], minlength=9000) * np.arange(9000)
    assert (counts[1:9000] == expected[1:]).all(), "each token is there once"


def test_rows_of_usual_length_are_packed_as_before() -> None:
    """A run that goes on needs the same rows, so at 64k tokens and below nothing waits."""
    lengths = np.random.default_rng(1).integers(500, 9000, 1000).tolist()
    packer = BestFit(1 << 14, fill_id=0)
    found: list[list[int]] = []
    for number, length in enumerate(lengths, start=1):
        rows = [row for some in packer.add(np.full(length, number, dtype=np.int32)) for row in some]
        found += [sorted({*(row & IDS).tolist()} - {0}) for row in rows]
        if rows:
            expected = best_fit(lengths[:number], 1 << 14)
            assert found == [[1 + place for place in row] for row in expected]
    assert found


def test_padded_rows_are_made_a_few_at_a_time() -> None:
    packer = OnePerRow(1 << 20, fill_id=0)
    sizes = [len(rows) for _ in range(20) for rows in packer.add(np.ones(10, dtype=np.int32))]
    assert sizes == []
    assert [len(rows) for rows in packer.finish()] == [8, 8, 4]


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_takes_the_fullest_row_that_has_room(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, 40) for _ in range(300)]
    rows: list[tuple[int, list[int]]] = []
    order = 0
    touched: dict[int, int] = {}
    for number in sorted(range(300), key=lambda number: -lengths[number]):
        fitting = [(room, -touched[at], at) for at, (room, _) in enumerate(rows) if room >= lengths[number]]
        at = min(fitting)[2] if fitting else len(rows)
        if not fitting:
            rows.append((40, []))
        room, numbers = rows[at]
        rows[at] = room - lengths[number], [*numbers, number]
        touched[at] = order = order + 1
    assert best_fit(lengths, 40) == sorted(sorted(numbers) for _, numbers in rows)


def test_joined_rows_of_a_million_tokens_leave_none_out() -> None:
    packer, rows = Joining(1 << 20), []
    for number in range(9):
        rows += [row for some in packer.add(np.full(1 << 18, number, dtype=np.int32)) for row in some]
    assert [row[:: 1 << 18].tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- time and memory -----------------------------------------------------------------------------------------


def test_packing_takes_no_longer_for_longer_rows() -> None:
    lengths = np.random.default_rng(0).integers(10, 100, 76_000).tolist()
    best_fit(lengths, 1 << 13)
    began = spent_s()
    best_fit(lengths, 1 << 20)
    assert spent_s() - began < 2.0, "11 s with a bit for each token of room"


def test_a_row_of_many_documents_is_taken_apart(tokenizer: Any, tmp_path: Path) -> None:
    lengths = [10] * 50_000
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"input_ids": [1] * 500_000, "seq_lengths": lengths}) + "\n")
    began = spent_s()
    packed = prepare(tokenizer, file, seq_len=500_000, way="best_fit")
    assert packed.counts.examples == len(lengths)
    assert spent_s() - began < 8.0, "14 s where each start is a sum of all lengths before"


def test_few_long_examples_are_tokenised_at_a_time() -> None:
    source = Source(file="a", row=1)
    chat = ChatExample(source=source, messages=(Message(role="user", content="a" * 600_000),) * 2)
    tokens = TokensExample(source=source, input_ids=(1,) * 300_000)
    text = TextExample(source=source, text="a" * 9)
    sizes = [len(chunk) for chunk in processes._chunks([chat, chat, tokens, text, text, chat, *[text] * 300])]
    assert sizes == [1, 1, 1, 3, 256, 44]


def test_few_long_rows_of_parquet_are_turned_into_values_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [5, 1000, 3, 2000, 1] * 20
    table = pa.table({"input_ids": [[number] * length for number, length in enumerate(lengths)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    monkeypatch.setattr(arrow_rows, "_BATCH_BYTES", 20_000)
    rows = list(read_examples(DataConfig(path=str(tmp_path / "rows.parquet"))))  # type: ignore[arg-type]
    assert [len(row.input_ids) for row in rows] == lengths  # type: ignore[union-attr]
    assert [row.source.row for row in rows] == list(range(1, 101))


def test_the_length_of_documents_is_measured_row_by_row(
    tokenizer: Any, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(tokenizer, files["parquet"], seq_len=LONG, way="best_fit")
    asked: list[int] = []
    read = RowFile.__getitem__

    def counted(self: RowFile, numbers: Sequence[int]) -> Any:
        asked.append(len(numbers))
        return read(self, numbers)

    monkeypatch.setattr(RowFile, "__getitem__", counted)
    squares = LONG**2 + 64 * SHORT**2 + 6 * SHORT**2 + (LONG - 6 * SHORT) ** 2
    expected = -(-(squares // (3 * LONG)) // 64) * 64
    assert prepared.document_len == expected
    assert asked == [1, 1, 1]


class _Counted(Sequence[Piece]):
    """Pieces, and how often one was looked at."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces, self.looks = pieces, 0

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return self._pieces[place]

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self.looks += 1
            yield piece


def test_the_end_of_a_turn_is_found_without_a_look_at_all_others() -> None:
    """A conversation of 10,000 turns: each end was looked for among all pieces."""
    pieces = [Piece(10 * n, 10 * n + 10, n, False, None) for n in range(10_000)]
    counted = _Counted(pieces)
    rendered = Rendered("x" * 9 + " " + "x" * 99_990, counted, {})
    assert _ended(rendered, [(0, 10)], "") == [(0, 9)]
    assert _ended(rendered, [(10, 20)], "") == [(10, 20)]
    assert counted.looks < 40
