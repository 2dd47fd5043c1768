"""Manifests of checkpoints and records of drives: any bytes are read or refused, also with a right digest."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import xxhash

from megatrain.checkpoint.format import MANIFEST_NAME, FileEntry, Manifest, encode_manifest
from megatrain.checkpoint.load import newest_whole, verify
from megatrain.store.drives.record import RECORD_NAME, CommitRecord, read_record, write_record
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_bytes, mutated_json


def resealed(text: bytes) -> bytes:
    """Return the JSON of an object with a digest at its end that is right for it, as a stranger can make."""
    head = text.strip()[:-1].rstrip()
    return head + f',\n "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode()


def damaged(random: Random, data: bytes) -> bytes:
    """Return a file with damage, or one that was changed and sealed again."""
    if random.random() < 0.3:
        return mutated_bytes(random, data)
    body = json.loads(data)
    del body["digest"]
    changed = mutated_json(random, body)
    return resealed(changed)


def read_manifest(root: Path, whole: bytes, random: Random) -> None:
    checkpoint = root / "step-00000007"
    (checkpoint / MANIFEST_NAME).write_bytes(damaged(random, whole))
    if random.random() < 0.2:
        newest_whole(root, warn=lambda text: None)
    else:
        verify(checkpoint, digests=random.random() < 0.5)


@counts(sample=1500, soak=100_000)
def test_any_manifest_is_read_or_refused(tmp_path: Path, num: int) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"mine")
    entries = []
    for name, data in (("config.json", b"{}"), ("state.bin", bytes(range(200)))):
        (checkpoint / name).write_bytes(data)
        digests = tuple(xxhash.xxh3_128_hexdigest(data[at : at + 64]) for at in range(0, len(data), 64))
        entries.append(FileEntry(name=name, num_bytes=len(data), digests=digests))
    meta = {"config": {"out": "x"}, "position": [1, 2, None]}
    whole = encode_manifest(Manifest(step=7, meta=meta, files=tuple(entries), chunk_bytes=64))
    (checkpoint / MANIFEST_NAME).write_bytes(whole)
    assert verify(checkpoint).step == 7
    assert attack(num, partial(read_manifest, checkpoint.parent, whole), checkpoint.parent) > num // 2


def read_drive_record(folder: Path, whole: bytes, random: Random) -> None:
    (folder / RECORD_NAME).write_bytes(damaged(random, whole))
    read_record(folder)


@counts(sample=4000, soak=50_000)
def test_any_record_of_drives_is_read_or_refused(tmp_path: Path, num: int) -> None:
    values: dict[str, Any] = {"owner": "run", "fingerprint": "0" * 32, "drives": ("a1", "b2"), "step": 3}
    record = CommitRecord(**values, copies="01-0", sums=(1, 2**64 - 1), meta={"x": [1, None]})
    write_record(tmp_path, record)
    whole = (tmp_path / RECORD_NAME).read_bytes()
    assert read_record(tmp_path) == record
    assert attack(num, partial(read_drive_record, tmp_path, whole), tmp_path) > num // 2
