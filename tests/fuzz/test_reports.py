"""A run directory of a stranger, with files of any content, is shown or refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random

import pytest

from megatrain.train.report.card import model_card
from megatrain.train.report.collect import read_run
from megatrain.train.report.page import page_data
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_bytes, mutated_json
from tests.train.report.run_files import write_run

TRACE = {
    "traceEvents": [
        {"pid": 1, "tid": 1, "ph": "M", "name": "thread_name", "args": {"name": "fetch"}},
        {"pid": 1, "tid": 1, "ph": "i", "name": "step", "ts": 0.0},
        {"pid": 1, "tid": 1, "ph": "X", "name": "fetch b0", "ts": 1.0, "dur": 2.0, "args": {}},
    ]
}


def read(run: Path, whole: dict[str, bytes], random: Random) -> None:
    for name in random.sample(list(whole), random.choice((1, 1, 2))):
        data = whole[name]
        if name.endswith(".jsonl"):
            lines = data.splitlines()
            lines[random.randrange(len(lines))] = mutated_json(random, json.loads(random.choice(lines)))
            data = b"\n".join(lines) + b"\n"
        elif name.endswith(".json"):
            data = mutated_json(random, json.loads(data))
        else:
            data = mutated_bytes(random, data)
        (run / name).write_bytes(data)
    try:
        json.dumps(page_data(read_run(run)), allow_nan=False)
        model_card(run)
    finally:
        for name, data in whole.items():
            (run / name).write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    events = (
        ("start", 0, {"steps": 100}),
        ("evaluation", 10, {"name": "val", "loss": 2.0, "perplexity": 7.4}),
        ("skipped", 12, {"reason": "x"}),
        ("ranks", 13, {"codes": {"1": 7}, "sentences": {"1": "lost"}, "left": 1}),
        ("end", 20, {"waited_s": {"0": [1.0, 2.0]}}),
    )
    run = write_run(tmp_path / "run", events=events)
    (run / "trace.json").write_text(json.dumps(TRACE))
    return run


@counts(sample=150, soak=20_000)
def test_any_run_directory_is_shown_or_refused(run: Path, num: int) -> None:
    names = ("config.yaml", "env.json", "plan.json", "metrics.jsonl", "events.jsonl", "trace.json")
    whole = {name: (run / name).read_bytes() for name in names}
    attack(num, partial(read, run, whole), run.parent)
