"""Parquet and Arrow files of any bytes are read or refused."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from random import Random

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from megatrain.config.sections.data import DataConfig
from megatrain.data.read.examples import read_examples
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_bytes

TABLES = (
    pa.table({"text": ["one row", "another", ""], "number": [1, 2, 3]}),
    pa.table({"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 3}),
    pa.table({"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3]]}),
    pa.table({"text": pa.array([1.5, None]), "when": pa.array([0, 1], pa.timestamp("us"))}),
    pa.table({"text": pa.array([b"bytes", b"\xff"], pa.binary())}),
)


def _parquet(table: pa.Table, compression: str) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table, sink, compression=compression)
    return sink.getvalue()


def _arrow(table: pa.Table, *, is_file: bool) -> bytes:
    sink = io.BytesIO()
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


WHOLE = {
    ".parquet": [_parquet(table, each) for table in TABLES for each in ("none", "zstd")],
    ".arrow": [_arrow(table, is_file=is_file) for table in TABLES for is_file in (False, True)],
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` makes a file for each file that it reads; it makes them in the test's directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def read(folder: Path, kind: str, random: Random) -> None:
    data = random.choice(WHOLE[kind])
    at = random.choice((0, max(0, len(data) - 400), random.randrange(len(data))))
    damaged = (
        data[:at] + mutated_bytes(random, data[at:]) if random.random() < 0.9 else mutated_bytes(random, data)
    )
    file = folder / f"rows{kind}"
    file.write_bytes(damaged)
    try:
        for example in read_examples(DataConfig(path=str(file), seq_len=64)):  # type: ignore[arg-type]
            assert example is not None
    finally:
        file.unlink()


@counts(sample=150, soak=20_000)
def test_any_parquet_is_read_or_refused(tmp_path: Path, num: int) -> None:
    assert attack(num, partial(read, tmp_path, ".parquet"), tmp_path) > num // 4


@counts(sample=150, soak=20_000)
def test_any_arrow_is_read_or_refused(tmp_path: Path, num: int) -> None:
    assert attack(num, partial(read, tmp_path, ".arrow"), tmp_path) > num // 4
