"""Prepared rows that are kept: what cannot be used is made anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.cache import RowWriter, kept_rows

ROWS = np.arange(12, dtype=np.int32).reshape(3, 4)


@pytest.mark.parametrize(
    "manifest", ["[]", "null", "3", '{"shape": null}', '{"shape": ["a", 1]}', '{"sha', '{"shape": [3, 5]}']
)
def test_a_damaged_manifest_is_no_end_of_a_run(manifest: str, tmp_path: Path) -> None:
    made: list[Path] = []

    def make(place: Path) -> dict[str, Any]:
        made.append(place)
        writer = RowWriter(place, 4)
        writer.write(ROWS)
        return {"fingerprint": writer.close(), "shape": [3, 4]}

    first = kept_rows(tmp_path, "key", make).manifest
    assert kept_rows(tmp_path, "key", make).manifest == first
    assert len(made) == 1
    file = tmp_path / "key/manifest.json"
    file.chmod(0o600)
    file.write_text(manifest)
    again = kept_rows(tmp_path, "key", make)
    assert len(made) == 2
    assert again.manifest == first
    assert np.array_equal(again.rows[range(3)], ROWS)
    assert json.loads(file.read_text()) == first
