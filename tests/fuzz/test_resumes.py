"""A checkpoint whose record a stranger has changed, with a right digest, is gone on with or refused."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatrain.checkpoint.format import MANIFEST_NAME
from megatrain.config import Config
from megatrain.train.loop import train
from megatrain.train.records.directory import RunDirectory
from megatrain.train.resume_point import find_checkpoint, is_finished, point_of
from megatrain.train.run import prepare
from megatrain.train.shards import with_shards
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_value
from tests.fuzz.test_manifests import resealed
from tests.train.project import make_config


def read(config: Config, manifest: Path, whole: dict[str, Any], random: Random) -> None:
    settings = (
        {"config": whole["meta"]["config"]} if random.random() < 0.7 else {}
    )  # most values are settings
    given = {key: value for key, value in whole["meta"].items() if key not in settings}
    changed = mutated_value(random, given)
    body = {**whole, "meta": {**changed, **settings} if isinstance(changed, dict) else changed}
    manifest.write_bytes(resealed(json.dumps(body, indent=1).encode()))
    directory = RunDirectory(Path(config.out))
    found = find_checkpoint(directory, "auto")
    if found is not None:
        is_finished(directory, config, found[1])
    point = point_of(config, directory, found, [])
    run = prepare(with_shards(config, 1, point.record), point)
    try:
        next(run.loader)
    finally:
        run.engine.close()


@pytest.mark.filterwarnings("ignore")
@counts(sample=8, soak=1500)
def test_any_record_of_a_run_is_gone_on_with_or_refused(
    tmp_path: Path, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = make_config(
        tmp_path,
        train={"steps": 3},
        optim={"warmup_steps": 0},
        checkpoint={"every": 2},
        eval={"every": 2},
        data={"val_size": 0.1},
    )
    train(config)
    manifest = tmp_path / "run/checkpoints/step-00000002" / MANIFEST_NAME
    for later in (tmp_path / "run/checkpoints").glob("step-00000003"):
        later.rename(tmp_path / "later")
    whole = json.loads(manifest.read_bytes())
    del whole["digest"]
    num_refused = attack(num, partial(read, config, manifest, whole), tmp_path)
    assert num // 5 < num_refused < num * 9 // 10
