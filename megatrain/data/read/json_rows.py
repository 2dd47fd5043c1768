"""Reader of JSON Lines and of a JSON array; the first character decides which, not the file's name.

JSON is read here and not through `datasets`, whose type inference turns strings that look like dates into
datetimes and mixes rows of several types, and whose errors do not name the line. Memory is bounded by the
largest row: an array is parsed element by element too.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from megatrain.data.read.text_rows import MOST_ROW_BYTES, open_bytes, read_lines
from megatrain.data.row import Row, RowError, kind
from megatrain.errors import DataError

BOM = b"\xef\xbb\xbf"
_CHUNK = 2**20


def read_json(path: str) -> Iterator[Row]:
    """Read the rows of an array, or of an object on each line."""
    with open_bytes(path) as file:
        head = file.read(4096).removeprefix(BOM).lstrip()
        file.seek(0)
        if head.startswith(b"["):
            for number, value in enumerate(_elements(file, path), start=1):
                yield Row(number, _object(value), "row")
        else:
            yield from read_lines(file, _value)


def _value(line: str) -> Any:
    """Parse a line; return None if it is blank."""
    return _object(_parse(line)) if line.strip() else None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError("it is not valid JSON", more=f" (column {error.colno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:  # Python refuses long numbers and deep nesting
        raise RowError("it is not readable as JSON", more=f" ({error})") from error


def _object(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    return RowError("it is not an object", f'it is {kind(value)}, not an object such as {{"text": "..."}}')


def _elements(file: IO[bytes], path: str) -> Iterator[Any]:
    """Yield the elements of an array; a fault is the whole file's, since nothing tells where a row begins."""
    text = _Text(file, path)
    text.skip("[")
    if text.peek() == "]":
        text.skip("]")
    else:
        while True:
            yield text.element()
            if text.peek() == "]":
                text.skip("]")
                break
            text.skip(",")
    if text.peek():
        raise text.fault("Extra data", text.position)


class _Text:
    """The text of a file from a moving position on."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self.position = 0
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._buffer = ""
        self._line, self._column = 1, 1
        """The line and column of the first character of the buffer."""
        self._is_at_end = False
        self._json = json.JSONDecoder()

    def _more(self) -> bool:
        """Read more and forget the passed text; return False and change nothing if nothing is left."""
        while not self._is_at_end:
            raw = self._file.read(max(_CHUNK, len(self._buffer)))
            self._is_at_end = not raw
            try:
                new = self._decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                line = self._place(len(self._buffer))[0] + error.object.count(b"\n", 0, error.start)
                raise DataError(
                    f"{self._path}, line {line} is not valid UTF-8 (0x{error.object[error.start]:02x}, "
                    f"{error.reason}); convert the file to UTF-8"
                ) from error
            if new:
                self._line, self._column = self._place(self.position)
                self._buffer, self.position = self._buffer[self.position :] + new, 0
                return True
        return False

    def _place(self, position: int) -> tuple[int, int]:
        """Return the line and column of a position in the buffer."""
        newlines = self._buffer.count("\n", 0, position)
        if not newlines:
            return self._line, self._column + position
        return self._line + newlines, position - self._buffer.rindex("\n", 0, position)

    def fault(self, message: str, position: int) -> DataError:
        """Return the error of a file that breaks off or goes wrong at a position."""
        line, column = self._place(position)
        return DataError(
            f"{self._path} is not valid JSON (line {line}, column {column}: {message}); a JSON array cannot "
            "be read past a fault: repair the file, or write one object per line (.jsonl)"
        )

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            while self.position < len(self._buffer):
                if not (character := self._buffer[self.position]).isspace():
                    return character
                self.position += 1
            if not self._more():
                return ""

    def skip(self, character: str) -> None:
        """Skip a character that must come next."""
        found = self.peek()
        if found != character:
            raise self.fault(f"Expecting {character!r}" if found else "the file breaks off", self.position)
        self.position += 1

    def element(self) -> Any:
        """Parse the next value, reading more until it is whole."""
        self.peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._buffer, self.position)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self._buffer) - 16
                if len(self._buffer) - self.position > MOST_ROW_BYTES or not (cut and self._more()):
                    raise self.fault(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{self._path} is not readable as JSON ({error})") from error
            else:
                if end < len(self._buffer) or not self._more():  # a number could go on
                    self.position = end
                    return value
