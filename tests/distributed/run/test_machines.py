"""Two machines, made of namespaces: they join with no setting, train to the bits of one, and are cut off.

`benchmarks/distributed/lost_network.py` cuts the link twenty times, and starts real commands.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatrain.cli.commands import main
from megatrain.errors import RankError
from tests.distributed.machines import ADDRESSES, Machines, RefusedError
from tests.forks import run_script
from tests.train.project import make_config
from tests.train.tensors import tensors_in

TIMEOUT_S = 10.0
GRACE_S = 10.0
STEP = "step-00000002"
HOSTS = (ADDRESSES[0], "node0")
"""The first machine, as each pair is told: its address, or its name, which stands there for itself alone."""

_CUTS = """
import sys
from tests.distributed.run.test_machines import cut_both_ways
cut_both_ways(sys.argv[1])
"""


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train alone, and on two pairs of machines; cut the link of each pair, one at either end."""
    place = tmp_path_factory.mktemp("machines")
    try:
        with Machines(place):
            pass
    except RefusedError as error:
        pytest.skip(f"no namespaces here: {error}")
    done = run_script(_CUTS, place, after="tests.distributed.runs")
    assert done.returncode == 0, done.stderr + done.stdout
    return place


@pytest.mark.parametrize("end", [0, 1])
def test_machines_that_lose_each_other_in_silence_end_in_time_with_a_sentence(cuts: Path, end: int) -> None:
    """The first one has the store in which they meet."""
    for node, (code, seconds) in enumerate(json.loads((cuts / f"ended{end}.json").read_text())):
        said = (cuts / f"said{end}{node}").read_text()
        assert code == RankError.exit_code, said
        assert seconds < TIMEOUT_S + GRACE_S
        (sentence,) = re.findall(r"^error: .*", said, re.MULTILINE)
        lost = [
            r"error: rank 1 \(process \d+ on node1\) is stopped or lost: it has been silent for 1\d s",
            rf"error: the store where ranks meet \({HOSTS[end]}:29500\) has not answered for 1\d s",
        ][node]
        assert re.match(lost, sentence), sentence
        assert "The same command goes on from the newest checkpoint" in sentence
        assert "Traceback" not in said


@pytest.mark.parametrize("end", [0, 1])
def test_two_machines_join_with_no_setting_and_train_to_the_bits_of_one(cuts: Path, end: int) -> None:
    alone = cuts / "alone/checkpoints" / STEP
    expected = tensors_in(alone)
    found = tensors_in(cuts / f"run{end}/checkpoints" / STEP)
    assert len(expected) > 1
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def cut_both_ways(root: str) -> None:
    """Train, and write down how each machine's rank has ended, and after how long."""
    place = Path(root)
    alone = _started(describe(place, "alone", 2), place / "said", {})
    pairs = []
    for end in range(2):
        (place / f"pair{end}").mkdir()
        pairs.append(Machines(place / f"pair{end}"))
    config = [describe(place, f"run{end}", 100_000) for end in range(2)]
    ranks = [
        [_started(config[end], place / f"said{end}{node}", told(HOSTS[end], node), pair) for node in range(2)]
        for end, pair in enumerate(pairs)
    ]
    codes = {alone: os.waitstatus_to_exitcode(os.waitpid(alone, 0)[1])}
    assert codes[alone] == 0, (place / "said").read_text()
    since_s: dict[int, float] = {}
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < 4:
        for end, pair in enumerate(pairs):
            if end not in since_s and (place / f"run{end}/checkpoints" / STEP / "MANIFEST.json").exists():
                pair.cut(end)
                since_s[end] = time.monotonic()
            for rank in set(ranks[end]) - set(ended):
                process, status = os.waitpid(rank, os.WNOHANG)
                if process:
                    assert end in since_s, [path.read_text() for path in place.glob(f"said{end}*")]
                    ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - since_s[end]
        time.sleep(0.05)
    for end, pair in enumerate(pairs):
        pair.close()
        (place / f"ended{end}.json").write_text(json.dumps([ended[rank] for rank in ranks[end]]))


def told(host: str, node: int) -> dict[str, str]:
    """Return what a scheduler tells the only rank of a machine."""
    numbers: dict[str, Any] = {"RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    numbers |= {"MASTER_ADDR": host, "MASTER_PORT": 29500}
    return {name: str(number) for name, number in numbers.items()}


def describe(place: Path, out: str, steps: int) -> Path:
    """Write the file of a run whose first steps do not depend on how many there are."""
    config = make_config(
        place,
        out,
        train={"steps": steps, "grad_accumulation": 4},
        optim={"schedule": "constant", "warmup_steps": 0},
        parallel={"shards": 4, "timeout": TIMEOUT_S},
        checkpoint={"every": 2, "keep_last": None},
        log={"report": False},
    )
    path = place / f"{out}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return path


def _started(config: Path, said: Path, environment: dict[str, str], machines: Machines | None = None) -> int:
    """Start the command in a fork, on a machine if one is given; return the process."""
    process = os.fork()
    if process == 0:
        signal.alarm(240)
        if machines is not None:
            machines.enter(int(environment["RANK"]))
        os.environ.update(environment)
        for number in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        code: object = 1
        try:
            main(["train", str(config)])
            code = 0
        except SystemExit as ended:
            code = ended.code
        sys.exit(code)
    return process
