"""Name the parts of a checkpoint directory, and encode and parse its manifest.

    checkpoints/
      step-00000150/      a whole checkpoint: the caller's files, and MANIFEST.json, written after all of them
      step-00000150-2/    the second attempt at a step that was trained again with another result
      .tmp-step-...       a save that has not been committed; never read, removed by the next save
      .trash-step-...     an old checkpoint on its way out; never read, removed by the next save

What must stay true: names in a manifest are relative and stay inside the directory, so that a checkpoint can
be copied anywhere; the last member of a manifest is a digest of every byte before it, in this and in every
later version. The digests (xxh3, 128 bits) guard against accidents, not against an attacker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

FORMAT_VERSION = 1
CHUNK_BYTES = 64 * 2**20
"""Bytes of a file under one digest: a short manifest, and a damaged place that has a useful name."""
MANIFEST_NAME = "MANIFEST.json"
MANIFEST_BYTES_MAX = 64 * 2**20
"""A larger manifest is refused before it is read; 1.4 TB in chunks of 64 MiB needs one of about 1 MB."""

_MOST_DEPTH = 100
"""Lists and mappings inside each other in a manifest; what a run writes has some ten. Python's own limit
counts its frames, and a function that walks what one could just parse would fail."""

_STEP = re.compile(r"step-([0-9]{8,})(?:-([0-9]+))?")
_LEFTOVER = re.compile(r"\.(?:tmp|trash)-step-[0-9]{8,}(?:-[0-9]+)?-[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_TAIL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n\}\n\Z')
_TAIL_BYTES = len(',\n "digest": ""\n}\n') + 32


class FormatError(Exception):
    """A fault of a manifest, as a clause that does not name the path; `load` says where it is."""


class NewerFormatError(FormatError):
    """A sound manifest of a later format version: not damage, but nothing that this version can read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """The entry of a manifest about one file."""

    name: str
    """Relative to the checkpoint directory, parts joined by `/`."""
    num_bytes: int
    """Size of the file."""
    digests: tuple[str, ...]
    """xxh3-128 of each chunk in order, in hexadecimal; none for an empty file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of a checkpoint: parsed from, or about to become, `MANIFEST.json`."""

    step: int
    """Optimizer steps that the state has been through."""
    meta: Mapping[str, Any]
    """Plain JSON values of the caller: RNG states, data position, schedule, configuration."""
    files: tuple[FileEntry, ...]
    """Every file but the manifest, by name."""
    chunk_bytes: int
    """Bytes under one digest; the last chunk of a file may be shorter."""


def directory_name(step: int, attempt: int = 1) -> str:
    """Name the directory of a step's checkpoint; attempts after the first carry their number."""
    return f"step-{step:08d}" if attempt == 1 else f"step-{step:08d}-{attempt}"


def parse_directory_name(name: str) -> tuple[int, int] | None:
    """Return (step, attempt), or None for a name that `directory_name` does not give."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step, attempt = int(match[1]), int(match[2] or 1)
    return (step, attempt) if directory_name(step, attempt) == name else None


def temporary_name(kind: str, name: str, token: str) -> str:
    """Name the directory that a checkpoint has before its commit ("tmp") or after its end ("trash")."""
    result = f".{kind}-{name}-{token}"
    assert is_leftover(result), result
    return result


def is_leftover(name: str) -> bool:
    """Say whether a name is one that `temporary_name` gives, thus a directory of ours that nobody reads."""
    return _LEFTOVER.fullmatch(name) is not None


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of `MANIFEST.json`, equal for equal manifests."""
    body = {
        "format": FORMAT_VERSION,
        "step": manifest.step,
        "chunk_bytes": manifest.chunk_bytes,
        "meta": dict(manifest.meta),
        "files": [
            {"name": entry.name, "bytes": entry.num_bytes, "xxh3_128": list(entry.digests)}
            for entry in manifest.files
        ],
    }
    text = json.dumps(body, indent=1, allow_nan=False)
    # A tuple or an integer key would come back as something else, and a resumed run would differ.
    assert json.loads(text) == body, "the meta of a checkpoint must be plain JSON values with string keys"
    head = text.removesuffix("\n}").encode("ascii")
    return head + f',\n "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode("ascii")


def fingerprint(manifest: Manifest) -> str:
    """Return a name for exactly this step, meta and bytes of files."""
    tail = _TAIL.search(encode_manifest(manifest))
    assert tail is not None
    return tail[1].decode("ascii")


def parse_manifest(data: bytes) -> Manifest:
    """Parse the bytes of a manifest, strictly: a member missing, unknown or of another type is refused.

    Raises:
        FormatError: The bytes are not those of a manifest, or not all of them.
        NewerFormatError: The manifest is sound and of a later format version.
    """
    tail = _TAIL.search(data, max(0, len(data) - _TAIL_BYTES))
    if tail is None:
        raise FormatError(f"{MANIFEST_NAME} does not end with its digest")
    if xxhash.xxh3_128_hexdigest(data[: tail.start()]).encode("ascii") != tail[1]:
        raise FormatError(f"{MANIFEST_NAME} differs from its own digest")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{MANIFEST_NAME} is not JSON") from error
    if _is_deeper(body, _MOST_DEPTH):
        raise FormatError(f"{MANIFEST_NAME} has lists and mappings more than {_MOST_DEPTH} deep")
    version = _member(body, "format", int)
    if version > FORMAT_VERSION:
        raise NewerFormatError(f"it has format version {version}, and this megatrain reads {FORMAT_VERSION}")
    if version < 1 or body.keys() != {"format", "step", "chunk_bytes", "meta", "files", "digest"}:
        raise FormatError(f"{MANIFEST_NAME} has members other than those of format version {FORMAT_VERSION}")
    step, chunk_bytes = _member(body, "step", int), _member(body, "chunk_bytes", int)
    if step < 0 or chunk_bytes < 1:
        raise FormatError(f"{MANIFEST_NAME} has a negative step or no chunk size")
    files = tuple(_parse_entry(item, chunk_bytes) for item in _member(body, "files", list))
    names = [entry.name for entry in files]
    if names != sorted(set(names)):
        raise FormatError(f"{MANIFEST_NAME} lists its files twice or out of order")
    return Manifest(step=step, meta=_member(body, "meta", dict), files=files, chunk_bytes=chunk_bytes)


def is_relative_name(name: str) -> bool:
    """Say whether a file name stays inside the checkpoint and is none of the format's own."""
    parts = name.split("/")
    return name != MANIFEST_NAME and "\0" not in name and not any(part in ("", ".", "..") for part in parts)


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Count the digests of a file."""
    return -(-num_bytes // chunk_bytes)


def _parse_entry(item: Any, chunk_bytes: int) -> FileEntry:
    name, num_bytes = _member(item, "name", str), _member(item, "bytes", int)
    digests = _member(item, "xxh3_128", list)
    if not is_relative_name(name):
        raise FormatError(
            f"{MANIFEST_NAME} names {name!r}, which is not a relative name inside the checkpoint"
        )
    sound = all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests)
    if num_bytes < 0 or not sound or len(digests) != num_chunks(num_bytes, chunk_bytes) or len(item) != 3:
        raise FormatError(f"{MANIFEST_NAME} has a wrong entry for {name!r}")
    return FileEntry(name=name, num_bytes=num_bytes, digests=tuple(digests))


def _member(body: Any, key: str, kind: type) -> Any:
    value = body.get(key) if isinstance(body, dict) else None
    if type(value) is not kind:  # not isinstance: JSON's true is a Python int
        raise FormatError(f"{MANIFEST_NAME} has no {key!r} of the right type")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and mappings lie inside each other more than so many deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)
