"""Documents from text files, each with the file and row that it came from.

Nothing is skipped in silence: a document is text, or the reader says which file and row is not. JSON is read
here and not through `datasets`, whose type inference turns strings that look like dates into datetimes and
mixes rows of several types, and whose errors do not name the line. Parquet has types of its own and comes
through `datasets`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import DataError, os_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text and where it came from."""

    text: str
    file: str
    row: int
    """Line of a `.jsonl` file, row of a `.json` or `.parquet` file, from 1; 1 for a `.txt` file."""


def read_texts(paths: Iterable[str], *, text_column: str = "text") -> Iterator[Document]:
    """Yield the documents of `paths` in order; documents of white space only are left out.

    Args:
        paths: `.txt` (the whole file is one document), `.jsonl`, `.json` or `.parquet` (each row is one).
        text_column: the column that holds the text of a row.

    Raises:
        DataError: a file that is missing, empty or of another kind, text that is not UTF-8, a row that is not
            JSON or has no text, or a file without a single usable document. Names the file and the row.
    """
    for path in paths:
        num_usable = 0
        for row, text in _rows(path, text_column):
            if text.strip():
                num_usable += 1
                yield Document(text=text, file=path, row=row)
        if num_usable == 0:
            raise DataError(f"{path}: no text in the file, only empty documents; remove it from data.path")


_Rows = Iterator[tuple[int, str]]


def _rows(path: str, text_column: str) -> _Rows:
    with os_errors("read", path, DataError):
        yield from _reader(path)(path, text_column)


def _reader(path: str) -> Callable[[str, str], _Rows]:
    readers = {".txt": _read_txt, ".jsonl": _read_json, ".json": _read_json, ".parquet": _read_parquet}
    file = Path(path)
    if file.is_dir():
        raise DataError(f"{path} is a directory; data.path takes files ({', '.join(readers)})")
    if not file.exists():
        raise DataError(f"{path} does not exist; check data.path")
    if file.suffix.lower() not in readers:
        raise DataError(f"{path}: files of this kind are not read; data.path takes {', '.join(readers)}")
    if file.stat().st_size == 0:
        raise DataError(f"{path} is empty; remove it from data.path or fill it")
    return readers[file.suffix.lower()]


def _read_txt(path: str, _: str) -> _Rows:
    yield 1, _decode(Path(path).read_bytes(), path=path)


def _decode(raw: bytes, *, path: str, first_line: int = 1, offset: int = 0) -> str:
    """Decode UTF-8, without a byte order mark at the start of a file."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: byte {offset + error.start} is not valid UTF-8 "
            f"(0x{raw[error.start]:02x}, {error.reason}); convert the file to UTF-8"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _read_json(path: str, text_column: str) -> _Rows:
    """Read JSON Lines, or one JSON array of rows; the first character decides, not the file's name."""
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if start.startswith(b"["):
            rows = _parse_json(_decode(file.read(), path=path), where=path)
            for number, row in enumerate(rows, start=1):
                yield number, _text_of(row, text_column, where=f"{path}, row {number}")
            return
        offset = 0
        for number, raw in enumerate(file, start=1):
            line = _decode(raw, path=path, first_line=number, offset=offset)
            offset += len(raw)
            if line.strip():
                where = f"{path}, line {number}"
                yield (
                    number,
                    _text_of(_parse_json(line.rstrip("\r\n"), where=where), text_column, where=where),
                )


def _parse_json(text: str, *, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"{where}: not valid JSON ({place}column {error.colno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:  # a number too long, or brackets too deep, for Python
        raise DataError(f"{where}: not readable as JSON ({error})") from error


def _text_of(row: object, text_column: str, *, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object such as {{"{text_column}": "..."}}, found {_kind(row)}')
    if text_column not in row:
        raise DataError(_no_column(text_column, row, where=where))
    return _checked(row[text_column], text_column, where=where)


def _no_column(text_column: str, columns: Iterable[str], *, where: str) -> str:
    names = ", ".join(map(str, columns)) or "none"
    return f'{where}: no column "{text_column}"; the columns are {names}; choose one with data.text_column'


def _checked(text: object, text_column: str, *, where: str) -> str:
    if not isinstance(text, str):
        raise DataError(f'{where}: column "{text_column}" holds {_kind(text)}, not text')
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f'{where}: column "{text_column}" holds half a surrogate pair, not text'
            ) from error
    return text


def _kind(value: object) -> str:
    kinds = {str: "a string", int: "a number", float: "a number", bool: "true or false", list: "a list"}
    kinds |= {dict: "an object", type(None): "null"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


def _read_parquet(path: str, text_column: str) -> _Rows:
    import datasets
    from pyarrow import parquet

    with _quiet_datasets(datasets):
        try:
            if parquet.read_metadata(path).num_rows == 0:
                raise DataError(f"{path} has no rows; remove it from data.path")
            rows = datasets.load_dataset("parquet", data_files=[path], split="train", streaming=True)
            if text_column not in rows.features:
                raise DataError(_no_column(text_column, rows.features, where=path))
            number = 0
            for batch in rows.select_columns([text_column]).iter(batch_size=1000):
                for text in batch[text_column]:
                    number += 1
                    yield number, _checked(text, text_column, where=f"{path}, row {number}")
        except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors and OSErrors
            raise DataError(f"{path}: not readable as parquet ({' '.join(str(error).split())})") from error


@contextmanager
def _quiet_datasets(datasets: Any) -> Iterator[None]:
    """Hold back progress bars and log lines: what goes wrong is raised here, with the file and row."""
    logger = logging.getLogger("datasets")
    level, shown = logger.level, datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            datasets.enable_progress_bars()
