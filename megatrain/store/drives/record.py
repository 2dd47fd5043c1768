"""The commit record: which copy of each extent belongs to the newest step that is whole on the drives.

One JSON file in the first directory, replaced atomically: written beside its place, fsynced, renamed, and the
directory fsynced. Its last member is a digest of every byte before it. What must stay true: it is written
after all that it names is durable, and nothing that it names is overwritten before the next one is durable.
"""

from __future__ import annotations

import base64
import json
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatrain.errors import CheckpointError
from megatrain.store.drives import system as calls
from megatrain.store.drives.places import drive_errors, sync_directory

RECORD_NAME = "commit.json"
FORMAT_VERSION = 1
_TAIL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n\}\n\Z')
_KEYS = {"format", "owner", "fingerprint", "drives", "step", "copies", "sums", "meta", "digest"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """What `commit.json` says."""

    owner: str
    """Whose state this is: a name that the run gives itself."""
    fingerprint: str
    """Of the extents and how they are cut and striped: another model's state is never read."""
    drives: tuple[str, ...]
    """A random name for each directory's file, in order: directories that were swapped are noticed."""
    step: int
    """Optimizer steps that the state has been through."""
    copies: str
    """`0` or `1` for each extent, `-` for one that was never written."""
    sums: tuple[int, ...]
    """xxh3-64 of each chunk of these copies, extent after extent; 0 where there is none."""
    meta: Mapping[str, Any]
    """Plain JSON values of the caller."""


def read_record(directory: Path) -> CommitRecord | None:
    """Read the record of a first directory; None if nothing was ever committed there.

    Raises:
        CheckpointError: The record is damaged, cannot be read, or is of a later version.
    """
    path = directory / RECORD_NAME
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
    body = json.loads(data)
    if body.get("format") != FORMAT_VERSION or body.keys() != _KEYS:
        raise CheckpointError(
            f"{path} was written by another version of megatrain; use that one, or remove the file to resume "
            "from the newest checkpoint"
        )
    sums = array("Q")
    sums.frombytes(base64.b64decode(body["sums"]))
    return CommitRecord(
        owner=body["owner"],
        fingerprint=body["fingerprint"],
        drives=tuple(body["drives"]),
        step=body["step"],
        copies=body["copies"],
        sums=tuple(sums),
        meta=body["meta"],
    )


def write_record(directory: Path, record: CommitRecord) -> None:
    """Replace the record of a first directory, durably; a crash leaves the old one or the new one.

    Raises:
        CapacityError: The drive is full.
        OutputError: It cannot be written.
    """
    path = directory / RECORD_NAME
    temporary = directory / f".{RECORD_NAME}.tmp"
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


def remove_record(directory: Path) -> None:
    """Remove the record, durably: from then on nothing is committed.

    Raises:
        OutputError: It cannot be removed.
    """
    path = directory / RECORD_NAME
    with drive_errors("remove", path):
        if path.exists():
            calls.system.unlink(path)
            sync_directory(directory)


def _encode(record: CommitRecord) -> bytes:
    body = {
        "format": FORMAT_VERSION,
        "owner": record.owner,
        "fingerprint": record.fingerprint,
        "drives": list(record.drives),
        "step": record.step,
        "copies": record.copies,
        "sums": base64.b64encode(array("Q", _as_words(record.sums)).tobytes()).decode(),
        "meta": dict(record.meta),
    }
    text = json.dumps(body, indent=1, allow_nan=False)
    assert json.loads(text) == body, "the meta of a commit must be plain JSON values with string keys"
    head = text.removesuffix("\n}").encode("ascii")
    return head + f',\n "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode("ascii")


def _as_words(values: Sequence[int]) -> Sequence[int]:
    assert array("Q").itemsize == 8
    return values
