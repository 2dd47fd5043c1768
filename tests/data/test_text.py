"""Reading text: every document, in order, or the sentence that says which row is not one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data.example import Source, TextExample
from megatrain.errors import DataError
from tests.data.documents import read_texts


def write_parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path)


def document(text: str, file: str, row: int) -> TextExample:
    return TextExample(source=Source(file=file, row=row), text=text)


def texts_of(path: Path, **options: str) -> list[str]:
    return [document.text for document in read_texts([str(path)], **options)]


def problem_of(path: Path, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        texts_of(path, **options)
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_documents_come_in_order_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\r\ntwo\n", encoding="utf-8", newline="")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "x"}\n\n{"text": " "}\n{"text": "y", "n": 1}', encoding="utf-8"
    )
    (tmp_path / "c.json").write_text('[{"text": "p"},\n {"text": "q"}]', encoding="utf-8")
    write_parquet(tmp_path / "d.parquet", {"text": ["", "z"], "n": [1, 2]})
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.json", "d.parquet")]
    assert list(read_texts(files)) == [
        document("one\r\ntwo\n", files[0], 1),
        document("x", files[1], 1),
        document("y", files[1], 4),
        document("p", files[2], 1),
        document("q", files[2], 2),
        document("z", files[3], 2),
    ]


def test_text_that_looks_like_another_type_stays_text(tmp_path: Path) -> None:
    rows = ["2020-01-01", "2020-01-02T00:00:00Z", "5", "true", "null", "\u2028 \u00e9 \U0001f600"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows), encoding="utf-8")
    assert texts_of(tmp_path / "a.jsonl") == rows


@settings(deadline=None)
@given(rows=st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=1))
def test_any_text_survives_every_format(tmp_path_factory: pytest.TempPathFactory, rows: list[str]) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = "\n".join(json.dumps({"text": row}, ensure_ascii=False) for row in rows)
    (folder / "a.jsonl").write_text(lines, encoding="utf-8", newline="")
    (folder / "a.json").write_text(json.dumps([{"text": row} for row in rows]), encoding="utf-8")
    assert texts_of(folder / "a.jsonl") == texts_of(folder / "a.json") == rows


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", "x"), ("b.jsonl", '{"text": "x"}'), ("c.json", '[{"text": "x"}]')):
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        assert texts_of(tmp_path / name) == ["x"]


def test_parquet_of_several_row_groups_and_string_types(tmp_path: Path) -> None:
    import pyarrow as pa

    rows = [f"row {number}" for number in range(2500)]
    for name, kind in (
        ("a", pa.string()),
        ("b", pa.large_string()),
        ("c", pa.dictionary(pa.int32(), pa.string())),
    ):
        path = tmp_path / f"{name}.parquet"
        write_parquet(path, {"body": pa.array(rows).cast(kind), "n": range(2500)})
        assert texts_of(path, text_column="body") == rows


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", b"", ["is empty"]),
        ("a.jsonl", b"", ["is empty"]),
        ("a.parquet", b"", ["is empty"]),
        ("a.txt", b" \n ", ["has no text, only empty documents"]),
        ("a.jsonl", b"\n\n", ["has no rows"]),
        ("a.jsonl", b'{"text": ""}\n', ["has no text, only empty documents"]),
        ("a.json", b"[]", ["has no rows"]),
        ("a.txt", b"ab\ncd\xff\n", ["line 2: byte 5 is not valid UTF-8 (0xff"]),
        ("a.txt", "caf\u00e9".encode("utf-16"), ["is UTF-16, and text is read as UTF-8"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', ["line 2: byte 24 is not valid UTF-8 (0xe9"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', ["line 2: it is not valid JSON (column 13:"]),
        (
            "a.jsonl",
            b'{"text": "a"} {"text": "b"}\n',
            ["line 1: it is not valid JSON (column 15: Extra data"],
        ),
        ("a.json", b'[{"text": "a"},\n{"text": }]', ["is not valid JSON (line 2, column 10:"]),
        ("a.jsonl", b"[" * 100_000, ["is not readable as JSON"]),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", ["line 1: it is not readable as JSON"]),
        ("a.jsonl", b'"text"\n', ["line 1: it is a string, not an object"]),
        ("a.json", b"[1]", ["row 1: it is a number, not an object"]),
        (
            "a.jsonl",
            b'{"body": "a", "n": 1}\n',
            ['line 1: there is no column "text"', "body, n", "data.text_column"],
        ),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', ['line 2: there is no column "text"']),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', ['line 2: column "text" holds a number, not text']),
        ("a.jsonl", b'{"text": null}\n', ['line 1: column "text" holds null, not text']),
        ("a.jsonl", b'{"text": ["a"]}\n', ['line 1: column "text" holds a list, not text']),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ["line 1:", "surrogate"]),
        ("a.parquet", b"not parquet at all", ["not readable as parquet"]),
        ("a.xlsx", b"text\na\n", ["not read; data.path takes .txt, .jsonl, .json, .csv"]),
    ],
)
def test_bad_file_is_one_clear_sentence(tmp_path: Path, name: str, content: bytes, parts: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    message = problem_of(path)
    for part in parts:
        assert part in message


def test_bad_parquet_is_one_clear_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"text": ["a", None]})
    assert 'row 2: column "text" holds null, not text' in problem_of(path)
    write_parquet(path, {"text": [1, 2]})
    assert 'row 1: column "text" holds a number, not text' in problem_of(path)
    write_parquet(path, {"body": ["a"], "n": [1]})
    assert (
        'there is no column "text"; the columns are body, n; choose one with data.text_column'
        in problem_of(path)
    )
    write_parquet(path, {"text": []})
    assert "has no rows" in problem_of(path)
    write_parquet(path, {"text": ["a"] * 1000})
    path.write_bytes(path.read_bytes()[:-20])
    assert "not readable as parquet" in problem_of(path)


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    assert "does not exist" in problem_of(tmp_path / "a.txt")
    assert "is a directory" in problem_of(tmp_path)


def test_second_file_that_is_bad_is_the_one_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(DataError, match=r"b\.txt is empty"):
        list(read_texts([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]))
