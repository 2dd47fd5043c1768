"""Drives that a plan wears out within a year: what is proposed makes them last, and half of it does not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.sizes import parse_bytes
from megatrain.hardware import Drives
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from megatrain.plan.search.wear import LEAST_DAYS, drive_days, spare_drives
from tests.plan.anatomies import Shape, llama_like, machine

ANATOMY = llama_like(Shape(num_layers=6), micro_batch_size=1, seq_len=512)
BATCH = StepBatch(micro_batch_size=1, seq_len=512, num_micro_batches=2)
PLAIN = Choice(fragments=False, sums="device", boundaries="device")


def request(rated_bytes: float | None) -> Request:
    drives = Drives(
        nbytes=1 << 40, read_bytes_per_s=2e9, write_bytes_per_s=1e9, rated_bytes_written=rated_bytes
    )
    return Request(
        spec=machine(host_bytes=601 << 20, drives=drives, flops=1e11),
        anatomy=ANATOMY,
        batch=BATCH,
        choice=PLAIN,
    )


@pytest.fixture(scope="module")
def worn() -> Request:
    """A run that uses its drives up in 60 days."""
    asked = request(1e15)
    days = drive_days(asked, make_plan(asked, budget=7_500))
    assert days is not None
    return request(1e15 * 60 / days)


def test_what_is_proposed_makes_the_drives_last(worn: Request) -> None:
    plan = make_plan(worn, budget=7_500)
    assert plan.bytes_per_step["drive_written"] > 0
    ram, steps = spare_drives(worn, plan, tokens=1)
    option = re.match(r"--ram (\S+):", ram)
    assert option is not None
    nbytes = parse_bytes(option[1], "--ram")
    roomy = make_plan(replace(worn, spec=worn.spec.with_ram(nbytes)), budget=1_000)
    assert roomy.bytes_per_step["drive_written"] == 0
    tokens = re.match(r"train\.tokens_per_step=(\d+) train\.grad_accumulation=auto: ([\d,]+) days", steps)
    assert tokens is not None
    count = int(tokens[1]) // BATCH.seq_len
    lasts = []
    for number in (count, count // 2):
        larger = replace(worn, batch=replace(BATCH, num_micro_batches=number))
        lasts.append(drive_days(larger, make_plan(larger, budget=7_500)))
    assert lasts[0] is not None
    assert lasts[1] is not None
    assert lasts[1] < LEAST_DAYS <= lasts[0]


def test_nothing_is_said_of_drives_that_last(worn: Request) -> None:
    for rated in (1e18, None):
        lasting = request(rated)
        assert list(spare_drives(lasting, make_plan(lasting, budget=1_000), tokens=1)) == []


def test_a_run_that_commits_is_not_told_that_memory_helps(worn: Request) -> None:
    """All of its state goes to drives, wherever it lives."""
    commits = replace(worn, commit_every=1)
    proposed = list(spare_drives(commits, make_plan(commits, budget=7_500), tokens=1))
    assert not any("--ram" in text for text in proposed)


def test_a_run_that_commits_what_ram_holds_is_told_how_not_to(worn: Request) -> None:
    """Where RAM does not hold it, it would be written to drives all the same."""
    roomy = replace(worn, spec=worn.spec.with_ram(2 << 30), commit_every=1, names_drives=True)
    plan = make_plan(roomy, budget=7500)
    assert plan.bytes_per_step["drive_written"] > 0
    first, *_ = spare_drives(roomy, plan, tokens=1)
    assert first.startswith("memory.commit_every=null (a crash goes back to the newest checkpoint): ")
    without = make_plan(replace(roomy, commit_every=None), budget=7500)
    assert without.bytes_per_step["drive_written"] == 0
    small = replace(worn, commit_every=1, names_drives=True)
    assert not any(
        "commit_every" in text for text in spare_drives(small, make_plan(small, budget=7500), tokens=1)
    )
