"""Sizes as a user writes and reads them: `24GiB`, `8TB`, tokens, numbers with nouns. It loads no pydantic."""

from __future__ import annotations

import re

from megatrain.errors import ConfigError

_BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    **{prefix + "B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{prefix + "iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([KMBTkmbt]?)")
_MANY = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]i?B|B|)\s*")


def read_bytes(value: object) -> object:
    """Turn "24GiB" into bytes; other values are left to the field's own check."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return int(float(match[1]) * _BYTES_PER_UNIT[match[2]]) if match else value


def parse_bytes(value: object, what: str) -> int:
    """Read a size of the command line: `1536GiB`, `8TB`, `0`, or a number of bytes.

    Args:
        value: The text or number.
        what: The option or field, named in the error.

    Raises:
        ConfigError: The value is no size, negative, or has a part of a byte.
    """
    size = read_bytes(value)
    is_part_of_a_byte = size == 0 and re.search("[1-9]", str(value)) is not None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or is_part_of_a_byte:
        raise ConfigError(f"{what} is {value!r}; use bytes or a size such as 24GiB or 8TB")
    return size


def parse_limit(value: int | str | None, what: str) -> int | None:
    """Read a size that may be left out, as `parse_bytes` does.

    Raises:
        ConfigError: `parse_bytes` raises it.
    """
    return None if value is None else parse_bytes(value, what)


def parse_tokens(text: str) -> int:
    """Read a number of tokens: `2e9`, `20B`, `1.5T`, `1_000_000`.

    Raises:
        ConfigError: The text is no number of tokens, or is below 1.
    """
    match = _NUMBER.fullmatch(text.strip())
    count = float(match[1].replace("_", "")) * _MANY[match[2].upper()] if match else 0.0
    if not 1 <= count < 1e18:
        raise ConfigError(f"--tokens is {text!r}; give a number of tokens such as 2e9, 500M or 20B")
    return round(count)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `1,024 rows`, `2 micro-batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def binary(nbytes: float) -> str:
    """Return bytes in the largest unit of which there is one: `1,368.1 GiB`, `9.37 GiB`, `8 bytes`."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        value = nbytes / unit
        if value >= 1:
            return f"{value:,.1f} {name}" if value >= 10 else f"{value:.2f} {name}"
    return f"{nbytes:.0f} bytes"
