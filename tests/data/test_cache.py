"""Prepared rows that are kept: what cannot be used is made anew."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megatrain.cli import main
from megatrain.data.cache import Kept, Removed, RowWriter, find_rows, kept_rows, remove_unused
from megatrain.data.loader import fingerprint

ROWS = np.arange(12, dtype=np.int32).reshape(3, 4)
FINGERPRINT = fingerprint(ROWS)


@pytest.mark.parametrize(
    "manifest",
    [
        *("[]", "null", "3", "{}", '{"mani', '{"shape": [3, 4]}'),
        {"shape": None},
        {"shape": ["a", 1]},
        {"shape": [3, 5]},
        {"shape": [3, 4], "fingerprint": "3x4-0"},
        {"shape": [3, 4], "fingerprint": FINGERPRINT},
        {"shape": [3, 4], "fingerprint": FINGERPRINT, "counts": {"rows": 3, "of a later version": 1}},
    ],
)
def test_a_manifest_that_cannot_be_used_is_no_end_of_a_run(
    manifest: str | dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged, or whole and of other software: a dict is written with the hash that it should have."""
    made: list[Path] = []

    def make(place: Path) -> dict[str, Any]:
        made.append(place)
        writer = RowWriter(place, 4)
        writer.write(ROWS)
        return {"fingerprint": writer.close(), "shape": [3, 4], "counts": {"rows": 3}}

    def check(kept: Kept) -> None:
        if list(kept.manifest["counts"]) != ["rows"]:
            raise KeyError("counts")

    first = kept_rows(tmp_path, "key", make, check).manifest
    assert kept_rows(tmp_path, "key", make, check).manifest == first
    assert len(made) == 1
    file = tmp_path / "key/manifest.json"
    file.chmod(0o600)
    if isinstance(manifest, dict):
        digest = xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
        manifest = json.dumps({"manifest": manifest, "hash": digest})
    file.write_text(manifest)
    assert find_rows(tmp_path, "key", check) is None
    again = kept_rows(tmp_path, "key", make, check)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(made) == 2
    assert again.manifest == first
    assert np.array_equal(again.rows[range(3)], ROWS)
    assert find_rows(tmp_path, "key", check) is not None


def test_a_digit_of_a_manifest_that_was_lost_is_noticed(tmp_path: Path) -> None:
    def make(place: Path) -> dict[str, Any]:
        writer = RowWriter(place, 4)
        writer.write(ROWS)
        return {"fingerprint": writer.close(), "shape": [3, 4], "counts": {"tokens": 12}}

    kept_rows(tmp_path, "key", make)
    file = tmp_path / "key/manifest.json"
    file.chmod(0o600)
    file.write_text(file.read_text().replace('"tokens": 12', '"tokens": 13'))
    assert find_rows(tmp_path, "key") is None
    assert kept_rows(tmp_path, "key", make).manifest["counts"] == {"tokens": 12}


def test_what_was_not_used_for_longest_is_removed_first(tmp_path: Path, capsys: Any) -> None:
    def make(place: Path) -> dict[str, Any]:
        writer = RowWriter(place, 4)
        writer.write(ROWS)
        return {"fingerprint": writer.close(), "shape": [3, 4]}

    def keys() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir() if path.is_dir())

    sets = {key: kept_rows(tmp_path, key, make) for key in "abcd"}
    for age, key in enumerate("dcba"):
        os.utime(tmp_path / key, (time.time() - 1000 * age,) * 2)
    size = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    assert not remove_unused(tmp_path, 4 * size).describe()
    assert find_rows(tmp_path, "a") is not None  # and so it is no longer the oldest
    (tmp_path / ".making-x").mkdir()
    (tmp_path / ".making-x" / "rows.bin").write_bytes(b"1234")
    (tmp_path / "notes").mkdir()  # of a user
    removed = remove_unused(tmp_path, 3 * size, for_s=1500)
    assert removed == Removed(1, size, 1, 4)
    left_over = "what a killed process had begun to prepare (4 bytes)"
    assert removed.describe() == f"1 set of prepared data ({size} bytes) and {left_over}"
    assert keys() == ["a", "c", "d", "notes"]
    assert remove_unused(tmp_path, 0, for_s=1500) == Removed(0, 0, 0, 0)
    with (tmp_path / ".lock-c").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # somebody makes it
        assert remove_unused(tmp_path, 0).describe() == f"2 sets of prepared data ({2 * size} bytes)"
    assert keys() == ["c", "notes"]
    assert np.array_equal(sets["a"].rows[range(3)], ROWS)
    with pytest.raises(SystemExit, match="0"):
        main(["data", "clean", "--cache", str(tmp_path)])
    assert capsys.readouterr().out == f"removed 1 set of prepared data ({size} bytes) from {tmp_path}\n"
    assert keys() == ["notes"]
    assert remove_unused(tmp_path / "none", 0) == Removed(0, 0, 0, 0)
