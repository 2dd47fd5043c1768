"""The commit record: which copy of each extent belongs to the newest step that is whole on the drives.

One JSON file in the first directory, replaced atomically: written beside its place, fsynced, renamed, and the
directory fsynced. Its last member is a digest of every byte before it. What must stay true: it is written
after all that it names is durable, and nothing that it names is overwritten before the next one is durable.

Each of several nodes has a record of its part, and they commit in two phases: `prepared.json` is durable on
all before any of them makes it `commit.json`, and only then overwrites what the one before names. So after a
crash the newest step that all nodes hold, prepared or committed, is whole, and there is one.
"""

from __future__ import annotations

import base64
import json
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from megatrain.errors import CheckpointError, first_line
from megatrain.store.drives import system as calls
from megatrain.store.drives.places import drive_errors, sync_directory

RECORD_NAME = "commit.json"
PREPARED_NAME = "prepared.json"
"""What becomes the record once every node has it."""
FORMAT_VERSION = 1
_TAIL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n\}\n\Z')
_KEYS = {"format", "owner", "fingerprint", "drives", "step", "copies", "sums", "meta", "digest"}
_NEWER_KEYS = {"extent_bytes", "chunk_bytes"}
"""Keys that records of earlier versions lack; nothing but `verification` needs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """What `commit.json` says."""

    owner: str
    """Whose state this is: a name that the run gives itself."""
    fingerprint: str
    """Of the extents and how they are cut and striped: another model's state is never read."""
    drives: tuple[str, ...]
    """A random name for each directory's file, in order: directories that were swapped are noticed.

    Before a `-`, in hexadecimal, of several nodes one number: so are drives of another start of the run."""
    step: int
    """Optimizer steps that the state has been through."""
    copies: str
    """`0` or `1` for each extent, `-` for one that was never written."""
    sums: tuple[int, ...]
    """xxh3-64 of each chunk of these copies, extent after extent; 0 where there is none."""
    meta: Mapping[str, Any]
    """Plain JSON values of the caller."""
    extent_bytes: tuple[int, ...] = ()
    """The size of each extent; empty in a record of an earlier version."""
    chunk_bytes: int = 0
    """The size at which extents are cut into chunks; 0 in a record of an earlier version."""


def read_record(directory: Path, name: str = RECORD_NAME) -> CommitRecord | None:
    """Read the record of a first directory, or the prepared one; None if there is none.

    Raises:
        CheckpointError: The record is damaged, cannot be read, or is of a later version.
    """
    path = directory / name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; check this path") from error
    tail = _TAIL.search(data)
    if tail is None or xxhash.xxh3_128_hexdigest(data[: tail.start()]).encode() != tail[1]:
        raise CheckpointError(
            f"{path} is damaged (it differs from its own digest); remove it to resume from the newest "
            "checkpoint"
        )
    try:
        body = json.loads(data)
        is_ours = isinstance(body, dict) and body.get("format") == FORMAT_VERSION
        is_ours = is_ours and body.keys() - _NEWER_KEYS == _KEYS
        return _decode(body) if is_ours else _refuse_version(path)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no record of a commit ({first_line(error)}); remove it to resume from the newest "
            "checkpoint"
        ) from error


def _refuse_version(path: Path) -> NoReturn:
    raise CheckpointError(
        f"{path} was written by another version of megatrain; use that one, or remove the file to resume "
        "from the newest checkpoint"
    )


def _decode(body: Mapping[str, Any]) -> CommitRecord:
    """Return the record that `_encode` has written.

    Raises:
        ValueError: A member is not what it writes.
        TypeError: A member is of another type.
    """
    kinds = {
        "owner": str,
        "fingerprint": str,
        "drives": list,
        "step": int,
        "copies": str,
        "sums": str,
        "meta": dict,
    }
    newer = {"extent_bytes": list, "chunk_bytes": int}
    for key, kind in {**kinds, **{key: newer[key] for key in newer.keys() & body.keys()}}.items():
        if type(body[key]) is not kind:  # not isinstance: JSON's true is a Python int
            raise TypeError(f"its {key} is a {type(body[key]).__name__}")
    if not all(type(size) is int and size >= 0 for size in body.get("extent_bytes", ())):
        raise ValueError("its extent_bytes are no sizes")
    if body["step"] < 0 or not all(isinstance(drive, str) for drive in body["drives"]):
        raise ValueError("it has a negative step, or a drive without a name")
    sums = array("Q")
    sums.frombytes(base64.b64decode(body["sums"], validate=True))
    given = {key: body[key] for key in body.keys() - {"format", "digest"}}
    lists = {"drives": tuple(body["drives"]), "extent_bytes": tuple(body.get("extent_bytes", ()))}
    return CommitRecord(**given | lists | {"sums": tuple(sums)})


def read_records(directory: Path) -> list[CommitRecord]:
    """Read what a first directory holds: what is committed there, and what is prepared.

    Raises:
        CheckpointError: `read_record` refuses.
    """
    found = (read_record(directory, name) for name in (RECORD_NAME, PREPARED_NAME))
    return [record for record in found if record is not None]


def newest_of_all(held: Sequence[Sequence[int]]) -> int | None:
    """Return the newest of the steps that every node holds, given by node; None: they share none."""
    return max(set.intersection(*map(set, held)), default=None)


def nothing_in_common(held: Sequence[Sequence[int]], where: Path) -> str:
    """Say that nodes hold no step that is one for all; `where` is the first directory of node 0."""
    each = (
        f"node {node} holds {' and '.join(f'step {step}' for step in sorted(steps)) or 'none'}"
        for node, steps in enumerate(held)
    )
    why = "" if newest_of_all(held) is None else ", of several starts of the run"
    return (
        f"the nodes hold no step in common on their drives ({', '.join(each)}{why}); give every node the "
        f"drives that it had, or remove {RECORD_NAME} and {PREPARED_NAME} in {where}, and in its like on the "
        "other nodes, to go on from the newest checkpoint"
    )


def write_record(directory: Path, record: CommitRecord, name: str = RECORD_NAME) -> None:
    """Replace the record of a first directory, durably; a crash leaves the old one or the new one.

    Raises:
        CapacityError: The drive is full.
        OutputError: The record cannot be written.
    """
    path = directory / name
    temporary = directory / f".{name}.tmp"
    data = memoryview(_encode(record))
    with drive_errors("write", path):
        descriptor = calls.system.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            done = 0
            while done < len(data):
                done += calls.system.pwritev(descriptor, [data[done:]], done)
            calls.system.fsync(descriptor)
        finally:
            calls.system.close(descriptor)
        calls.system.rename(temporary, path)
        sync_directory(directory)


def settle_records(directory: Path, record: CommitRecord) -> None:
    """Make a record of `read_records` the one that is left, before anything is written over another's state.

    Raises:
        OutputError: A file cannot be renamed or removed.
    """
    committed = read_record(directory)
    if committed is None or committed.step != record.step:
        confirm_record(directory)
    else:
        _remove(directory / PREPARED_NAME)


def confirm_record(directory: Path) -> None:
    """Make what is prepared the record, durably.

    Raises:
        OutputError: The record cannot be renamed.
    """
    path = directory / RECORD_NAME
    with drive_errors("write", path):
        calls.system.rename(directory / PREPARED_NAME, path)
        sync_directory(directory)


def remove_records(directory: Path) -> None:
    """Remove what is prepared and what is committed, durably: from then on nothing is.

    Raises:
        OutputError: A record cannot be removed.
    """
    _remove(directory / PREPARED_NAME)
    _remove(directory / RECORD_NAME)


def _remove(path: Path) -> None:
    with drive_errors("remove", path):
        if path.exists():
            calls.system.unlink(path)
            sync_directory(path.parent)


def _encode(record: CommitRecord) -> bytes:
    words = array("Q", record.sums)
    assert words.itemsize == 8
    body = {"format": FORMAT_VERSION} | {each.name: getattr(record, each.name) for each in fields(record)}
    body |= {"drives": list(record.drives), "meta": dict(record.meta)}
    body["extent_bytes"] = list(record.extent_bytes)
    body["sums"] = base64.b64encode(words.tobytes()).decode()
    text = json.dumps(body, indent=1, allow_nan=False)
    assert json.loads(text) == body, "the meta of a commit must be plain JSON values with string keys"
    head = text.removesuffix("\n}").encode("ascii")
    return head + f',\n "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode("ascii")
