"""Reader of plain text files."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from typing import IO, Any

from megatrain.data.row import Row, RowError

MOST_DOCUMENT_BYTES = 16 * 2**20
"""The size of a `.txt` file that is one document; a larger one is several, cut at line ends."""
_MOST_REST_BYTES = 2**20
"""The distance from there to the end of a line; a longer line is cut between two characters."""
MOST_ROW_BYTES = 256 * 2**20
"""The size of one row, so that a file without line ends is not read into memory as a whole."""
TOO_LONG = f"the row has more than {MOST_ROW_BYTES / 2**20:g} MiB"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""The byte order marks at the beginning of UTF-16 files."""


def open_bytes(path: str) -> IO[bytes]:
    """Open a file, unpacked if its name ends in `.gz`."""
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def decode(raw: bytes, *, offset: int = 0) -> str:
    """Decode UTF-8, without a byte order mark at the start of a file.

    Args:
        raw: The bytes, a part of a file.
        offset: The number of bytes of the file before them.

    Raises:
        RowError: The bytes are no UTF-8.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            "it is not valid UTF-8",
            f"byte {offset + error.start} is not valid UTF-8 (0x{raw[error.start]:02x}, {error.reason}); "
            "convert the file to UTF-8",
        ) from error
    return text if offset else text.removeprefix("\ufeff")


def read_txt(path: str, *, text_column: str = "text", is_by_line: bool = False) -> Iterator[Row]:
    """Read a file as one document, a large one as several, or each line as one."""
    with open_bytes(path) as file:
        if is_by_line:
            yield from read_lines(file, lambda line: {text_column: line})
            return
        number = end = 0
        held = b""
        while raw := held + file.read(MOST_DOCUMENT_BYTES - len(held)):
            held = b""
            if len(raw) == MOST_DOCUMENT_BYTES:
                raw += file.readline(_MOST_REST_BYTES)
                if not raw.endswith(b"\n"):
                    whole = _whole_characters(raw)
                    raw, held = raw[:whole], raw[whole:]
            number += 1
            begin, end = end, end + len(raw)
            try:
                yield Row(number, {text_column: decode(raw, offset=begin)}, "document")
            except RowError as error:
                line = _line_of_fault(raw) if number == 1 else 0
                yield Row(line or number, error, "line" if line else "document")


def _whole_characters(raw: bytes) -> int:
    """Return the number of bytes without an incomplete last character."""
    for place in range(len(raw) - 1, max(-1, len(raw) - 4), -1):
        first = raw[place]
        if first >= 0xC0:
            length = 2 + (first >= 0xE0) + (first >= 0xF0)
            return place if place + length > len(raw) else len(raw)
        if first < 0x80:
            break
    return len(raw)


def read_lines(file: IO[bytes], value_of: Callable[[str], Any]) -> Iterator[Row]:
    """Read each line as a row; `value_of` returns None for a line that is none, or raises RowError."""
    number = offset = 0
    while raw := file.readline(MOST_ROW_BYTES + 1):
        size, is_too_long = len(raw), len(raw) > MOST_ROW_BYTES
        while is_too_long and not raw.endswith(b"\n") and (raw := file.readline(MOST_ROW_BYTES)):
            size += len(raw)
        number += 1
        try:
            if is_too_long:
                raise RowError(TOO_LONG)
            value: Any = value_of(decode(raw, offset=offset).rstrip("\r\n"))
        except RowError as error:
            value = error
        if value is not None:
            yield Row(number, value, "line")
        offset += size


def _line_of_fault(raw: bytes) -> int:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return 1 + raw.count(b"\n", 0, error.start)
    return 0
