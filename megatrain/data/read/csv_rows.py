"""Reader of CSV and TSV files.

They are read with the `csv` module and not with `datasets`: pandas infers types (`007` becomes 7, `NA`
nothing), loses a whole chunk to one ragged row, and knows no line numbers. Here a cell is the text it is.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import IO

from megatrain.data.read.text_rows import MOST_ROW_BYTES, TOO_LONG, UTF_16, open_bytes
from megatrain.data.row import Row, RowError
from megatrain.errors import DataError

_MOST_CELL_CHARACTERS = 256 * 2**20
_MOST_LINES = 1000
"""The number of lines that one cell of a TSV file may have."""
_SEPARATOR_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)
"""The first line by which a file tells Excel its separator."""


def read_csv(path: str, *, delimiter: str = ",") -> Iterator[Row]:
    """Read the rows behind `start`; the first line that is not blank names the columns."""
    csv.field_size_limit(_MOST_CELL_CHARACTERS)
    with open_bytes(path) as file:
        lines = _Lines(file, path)
        first = next((line for line in lines if line.strip()), "")
        if separator := _SEPARATOR_LINE.fullmatch(first):
            delimiter, first = separator[1], next(lines, "")
        elif delimiter not in first and ";" in first:  # spreadsheets write it so where numbers have a comma
            delimiter = ";"
        names = first.split(delimiter)
        # A space behind every comma of the header is a habit, and is no part of names and cells.
        is_spaced = delimiter in ",;" and len(names) > 1 and all(name.startswith(" ") for name in names[1:])
        lines.give_back([first])
        if delimiter == "\t":
            rows: Iterator[list[str]] = _Tsv(lines)
        else:
            rows = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=is_spaced)
        try:
            header = next(rows, [])
        except csv.Error as error:
            raise DataError(
                f"{path}: the header, line {lines.number}, is not readable as CSV ({error})"
            ) from error
        while True:
            number = lines.number + 1
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Row(number, RowError("it is not readable as CSV", more=f" ({error})"), "line")
                continue
            if cells:
                yield Row(number, _cells(header, cells), "line")


class _Lines(Iterator[str]):
    """The lines of a file with their line ends, of whatever kind."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self.number = 0
        """The number of the last line."""
        self._path = path
        self._held: list[str] = []
        head = file.read(2)
        file.seek(0)
        encoding = "utf-16" if head in UTF_16 else "utf-8-sig"
        self._text = io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")

    def __next__(self) -> str:
        line = self._held.pop() if self._held else self._text.readline(MOST_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > MOST_ROW_BYTES:
            raise DataError(
                f"{self._path}, line {self.number}: {TOO_LONG}; this is no CSV, or it has no line ends"
            )
        return line

    def give_back(self, lines: Sequence[str]) -> None:
        """Push back the last lines, so that they are read again."""
        self._held += reversed(lines)
        self.number -= len(lines)


class _Tsv(Iterator[list[str]]):
    """Rows between tabs, where a quote may be text, or may begin a cell with several lines.

    A line that has as many cells as the header is a row, and an open quote in it is text.
    """

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._num_columns = 0

    def __next__(self) -> list[str]:
        """Return the cells of the next row.

        Raises:
            csv.Error: A quote stays open.
        """
        line = next(self._lines)
        cells = _split(line)
        if any(cell.startswith('"') for cell in cells):
            cells = self._with_quotes(line)
        self._num_columns = self._num_columns or len(cells)
        return cells if any(cells) else []

    def _with_quotes(self, first: str) -> list[str]:
        """Return the cells of a row in which a cell begins with a quote."""
        lines = [first]
        while (quoted := _quoted("".join(lines))) is None:
            line = next(self._lines, "")
            lines += [line] if line else []
            if not line or len(lines) > _MOST_LINES or (self._is_row(line) and '"' not in line):
                break
        is_one_cell = len(lines) == 1 or not (self._is_row(first) and self._is_row(lines[-1]))
        if quoted is not None and is_one_cell:
            return quoted
        self._lines.give_back(lines[1:])
        if self._num_columns not in (0, len(_split(first))):
            raise csv.Error("a quote stays open")
        return _split(first)

    def _is_row(self, line: str) -> bool:
        return self._num_columns > 1 and len(_split(line)) == self._num_columns


def _split(line: str) -> list[str]:
    return line.rstrip("\r\n").split("\t")


def _quoted(text: str) -> list[str] | None:
    """Return the cells of lines with quotes; None if a quote is open, or text follows a closed one."""
    if text.count('"') % 2:
        return None
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True))
    except csv.Error:
        return None
    return rows[0] if len(rows) == 1 else None


def _cells(header: list[str], cells: list[str]) -> dict[str, str] | RowError:
    if len(cells) != len(header):
        return RowError(
            "it has another number of cells than the header",
            f"it has {len(cells)} cells, but the header names {len(header)} columns",
        )
    for name, cell in zip(header, cells, strict=True):
        if not cell.isascii() and any("\udc80" <= character <= "\udcff" for character in cell):
            return RowError(
                "it is not valid UTF-8", f'column "{name}" is not valid UTF-8; convert the file to UTF-8'
            )
    return dict(zip(header, cells, strict=True))
