"""Machine files: a `HardwareSpec` as JSON, bundled under a name or written by `megatrain doctor --out`.

A file has the fields of `HardwareSpec` under their names, in bytes, bytes/s and FLOP/s, `memory` as a list of
nodes and `drives` as an object or null, and in `sources` where each figure is from. Loads neither torch nor
numba.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError, OutputError
from megatrain.hardware.spec import Drives, HardwareSpec, MemoryNode

_BUNDLED = Path(__file__).parent / "machines"
_DTYPES = ("bf16", "fp32")
_LARGEST = 1e30
"""No figure of a machine is larger, and arithmetic with it does not overflow."""
_MOST_BYTES = 2**20
_Reader = Callable[[str, Any], Any]
"""Takes the name of a field, for errors, and its JSON value; returns the value of the dataclass."""


class _Wrong(Exception):
    """A fault of a field, in words that do not name the file."""


def machine_names() -> tuple[str, ...]:
    """Return the names of the bundled machines, in alphabetic order."""
    return tuple(sorted(file.stem for file in _BUNDLED.glob("*.json")))


def load_machine(name_or_path: str | os.PathLike[str]) -> HardwareSpec:
    """Return a bundled machine by its name, or the machine that a JSON file describes.

    Raises:
        ConfigError: An unknown name, a file that cannot be read, or a field that is missing, unknown or
            wrong: one sentence with the file and the field.
    """
    text = os.fspath(name_or_path)
    if text.lower() in machine_names():
        return read_machine(_BUNDLED / f"{text.lower()}.json", source=f"machine {text.lower()}")
    path = Path(text).expanduser()
    if path.suffix != ".json" and os.sep not in text and not path.exists():
        close = difflib.get_close_matches(text.lower(), machine_names(), n=1)
        hint = f"did you mean {close[0]}? The" if close else "the"
        raise ConfigError(
            f"there is no machine {text!r}; {hint} bundled machines are {', '.join(machine_names())}, and a "
            "machine file is given by its path"
        )
    return read_machine(path, source=text)


def read_machine(path: Path, *, source: str) -> HardwareSpec:
    """Read a machine file; `source` names it in errors.

    Raises:
        ConfigError: The file is refused, as by `load_machine`.
    """
    return parse_machine(read_json(path, source=source), source=source)


def read_json(path: Path, *, source: str) -> object:
    """Read a JSON file in which no key is given twice.

    Raises:
        ConfigError: The file cannot be read, or is not such a file.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{source} is larger than 1 MiB, and no machine file is; check the path")
        return json.loads(content.decode(), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise ConfigError(f"the machine file {source} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not JSON (line {error.lineno}: {error.msg})") from error
    except _Wrong as error:
        raise ConfigError(f"{source}: {error}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or very deep nesting
        raise ConfigError(f"{source} is not a machine file ({error})") from error


def parse_machine(raw: object, *, source: str) -> HardwareSpec:
    """Return the machine that the JSON of a machine file describes; `source` names the file in errors.

    Raises:
        ConfigError: A field is missing, unknown or wrong.
    """
    try:
        values = _object("the machine", raw, HardwareSpec, _FIELDS)
        for key in values["sources"]:
            if key not in _FIELDS:
                raise _Wrong(f"sources names {key!r}, which is not a field; {_nearest(key, _FIELDS)}")
    except _Wrong as error:
        raise ConfigError(f"{source}: {error}") from error
    return HardwareSpec(**values)


def machine_json(spec: HardwareSpec) -> dict[str, Any]:
    """Return the machine as the object of a machine file."""
    counts = {str(count): rate for count, rate in spec.update_params_per_s.items()}
    return asdict(spec) | {"update_params_per_s": counts}


def save_machine(spec: HardwareSpec, path: str | os.PathLike[str]) -> None:
    """Write a machine file that `load_machine` reads back as an equal machine; an old one is replaced whole.

    Raises:
        OutputError: The file cannot be written.
    """
    write_json(machine_json(spec), Path(path))


def write_json(value: object, path: Path) -> None:
    """Write a JSON file whole, or leave what was there.

    Raises:
        OutputError: The file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise OutputError(f"the machine file {path} cannot be written ({error.strerror})") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Wrong(f"the key {key} is given twice; keep one")
        found[key] = value
    return found


def _object(where: str, raw: object, kind: type, readers: Mapping[str, _Reader]) -> dict[str, Any]:
    """Read the fields of a dataclass: none unknown, none missing that has no default."""
    few = ", ".join(list(readers)[:3])
    if not isinstance(raw, dict):
        raise _Wrong(f"{where} is {_shown(raw)}; it must be an object with fields such as {few}")
    prefix = "" if kind is HardwareSpec else f"{where}."
    for key in raw:
        if key not in readers:
            raise _Wrong(f"there is no field {prefix}{key}; {_nearest(key, readers)}")
    needed = [
        prefix + field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING and field.name not in raw
    ]
    if needed:
        are = "the field {} is" if len(needed) == 1 else "the fields {} are"
        raise _Wrong(f"{are.format(', '.join(needed))} missing; every bundled machine file shows them")
    values = {key: readers[key](prefix + key, value) for key, value in raw.items()}
    return {"sources": {}, **values} if kind is HardwareSpec else values


def _expect(is_right: bool, name: str, value: Any, wanted: str) -> None:
    if not is_right:
        raise _Wrong(f"{name} is {_shown(value)}; it must be {wanted}")


def _reader(is_right: Callable[[Any], bool], wanted: str, made: Callable[[Any], Any]) -> _Reader:
    def read(name: str, value: Any) -> Any:
        _expect(is_right(value), name, value, wanted)
        return made(value)

    return read


def _number(minimum: float, above: bool, maximum: float = math.inf) -> _Reader:
    kind = f"a number {'above' if above else 'of at least'} {minimum:g}"
    kind += "" if maximum == math.inf else f" and at most {maximum:g}"

    def is_within(value: Any) -> bool:
        return _is_number(value) and minimum <= value <= maximum and not (above and value == minimum)

    return _reader(is_within, kind, float)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= _LARGEST  # false for nan too


def _or_null(reader: _Reader) -> _Reader:
    return lambda name, value: None if value is None else reader(name, value)


def _rates(name: str, value: Any) -> dict[str, float]:
    is_right = isinstance(value, dict) and set(value) == set(_DTYPES)
    _expect(is_right, name, value, f"an object with the keys {' and '.join(_DTYPES)}")
    return {dtype: _positive(f"{name}.{dtype}", value[dtype]) for dtype in _DTYPES}


def _attention(name: str, value: Any) -> dict[str, float]:
    """Read rates by dtype, and by dtype and size of heads: `bf16:64`."""
    if isinstance(value, dict) and not value:
        return {}
    of_sizes = {key: rate for key, rate in value.items() if ":" in key} if isinstance(value, dict) else {}
    for key in of_sizes:
        dtype, _, size = key.partition(":")
        if dtype not in _DTYPES or not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise _Wrong(
                f"{name} has the key {key!r}; its keys must be a dtype, or a dtype and a head's size"
            )
    plain = value if not of_sizes else {key: rate for key, rate in value.items() if key not in of_sizes}
    return _rates(name, plain) | {key: _positive(f"{name}.{key}", rate) for key, rate in of_sizes.items()}


def _compressed(name: str, value: Any) -> dict[str, float]:
    is_right = isinstance(value, dict) and all(" " in key for key in set(value) - {"bf16", "int8"})
    _expect(is_right, name, value, "an object with the keys bf16 and int8, or NAME FORMAT")
    return {key: _positive(f"{name}.{key}", rate) for key, rate in value.items()}


def _updates(name: str, value: Any) -> dict[int, float]:
    is_right = isinstance(value, dict) and bool(value)
    _expect(is_right, name, value, "an object from numbers of threads to rates")
    rates = {}
    for threads, rate in value.items():
        if not (threads.isascii() and threads.isdigit()) or int(threads) < 1:
            raise _Wrong(f"{name} has the key {threads!r}; its keys must be numbers of threads, 1 or more")
        rates[int(threads)] = _positive(f"{name}.{threads}", rate)
    return dict(sorted(rates.items()))


def _nodes(name: str, value: Any) -> tuple[MemoryNode, ...]:
    is_right = isinstance(value, list) and bool(value)
    _expect(is_right, name, value, "a list of at least one memory node")
    nodes = tuple(
        MemoryNode(**_object(f"{name}[{index}]", node, MemoryNode, _NODE_FIELDS))
        for index, node in enumerate(value)
    )
    if all(node.kind != "dram" for node in nodes):
        raise _Wrong(f"{name} has no node of the kind dram; at least one must be")
    return nodes


def _drives(name: str, value: Any) -> Drives | None:
    return None if value is None else Drives(**_object(name, value, Drives, _DRIVE_FIELDS))


def _sources(name: str, value: Any) -> dict[str, str]:
    _expect(isinstance(value, dict), name, value, "an object from fields to texts")
    return {key: _text(f"{name}.{key}", text) for key, text in value.items()}


_positive = _number(0, above=True)
_at_least_0 = _number(0, above=False)
_share = _number(0, above=True, maximum=1)
_whole = _reader(
    lambda value: _is_number(value) and value == int(value) and value >= 1,
    "a whole number of at least 1",
    int,
)
_text = _reader(lambda value: isinstance(value, str) and value != "", "text", str)
_bool = _reader(lambda value: isinstance(value, bool), "true or false", bool)
_kind = _reader(lambda value: value in ("dram", "cxl"), "dram or cxl", str)

_NODE_FIELDS: dict[str, _Reader] = {"nbytes": _whole, "bytes_per_s": _positive, "kind": _kind}
_DRIVE_FIELDS: dict[str, _Reader] = {
    "nbytes": _whole,
    "read_bytes_per_s": _positive,
    "write_bytes_per_s": _positive,
    "num_drives": _whole,
    "is_direct": _bool,
    "is_duplex": _bool,
    "rated_bytes_written": _or_null(_positive),
}
_FIELDS: dict[str, _Reader] = {
    "name": _text,
    "device": _text,
    "device_bytes": _or_null(_whole),
    "matmul_flops_per_s": _rates,
    "peak_flops_per_s": lambda name, value: {} if value == {} else _rates(name, value),
    "attention_flops_per_s": lambda name, value: _attention(name, value) or _rates(name, value),
    "attention_backward_flops_per_s": _attention,
    "flash2_share": _share,
    "multiprocessors": _or_null(_whole),
    "device_bytes_per_s": _positive,
    "h2d_bytes_per_s": _positive,
    "d2h_bytes_per_s": _positive,
    "both_share": _share,
    "pageable_share": _share,
    "memory": _nodes,
    "update_params_per_s": _updates,
    "compressed_params_per_s": _compressed,
    "num_cores": _whole,
    "num_gpus": _whole,
    "peer_bytes_per_s": _or_null(_positive),
    "peer_latency_s": _at_least_0,
    "num_nodes": _whole,
    "network_bytes_per_s": _or_null(_positive),
    "network_latency_s": _at_least_0,
    "drives": _drives,
    "device_watts": _or_null(_positive),
    "host_watts": _or_null(_positive),
    "price_usd": _or_null(_at_least_0),
    "price_per_hour_usd": _or_null(_at_least_0),
    "launch_s": _at_least_0,
    "launches_per_s": _or_null(_positive),
    "fuses_updates": _bool,
    "sources": _sources,
}
"""The reader of each field of `HardwareSpec`."""


def _nearest(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"


def _shown(value: object) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
