"""Rates at tiny sizes: every field is there, nothing is left behind, and the machine file reads back."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.doctor.bench import Bench, Sizes, run_bench
from megatrain.doctor.drive import DriveBench, measure_drive
from megatrain.doctor.machine_spec import keep, machine_of, this_machine
from megatrain.doctor.rates import CopyRates, lockable_bytes, thread_counts
from megatrain.errors import ConfigError
from megatrain.hardware import load_machine, memory_rate, save_machine
from megatrain.optim.threads import worker_threads

TINY = Sizes(
    seconds=0.0,
    copy_bytes=1 << 16,
    node_bytes=1 << 16,
    max_node_threads=2,
    update_numel=1 << 12,
    attention_tokens=128,
    file_bytes=1 << 20,
    blocks=(1 << 16, 1 << 18),
    drive_threads=(1, 3),
    cell_s=0.01,
    overhead_layers=0,
)


def tiny_drive(directory: Path) -> DriveBench:
    return measure_drive(
        directory, file_bytes=1 << 20, blocks=TINY.blocks, threads=TINY.drive_threads, cell_s=0.01
    )


def test_drive_is_measured_by_block_and_threads_and_left_as_it_was(tmp_path: Path) -> None:
    bench = tiny_drive(tmp_path)
    assert [(cell.block_bytes, cell.num_threads) for cell in bench.cells] == [
        (1 << 16, 1),
        (1 << 16, 3),
        (1 << 18, 1),
        (1 << 18, 3),
    ]
    assert bench.file_bytes == 1 << 20
    assert all(cell.read_bytes_per_s > 0 and cell.write_bytes_per_s > 0 for cell in bench.cells)
    assert bench.rates.read_bytes_per_s == max(cell.read_bytes_per_s for cell in bench.cells)
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_direct_io_is_measured_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    bench = tiny_drive(tmp_path)
    assert not bench.is_direct
    assert not bench.rates.is_direct
    assert bench.rates.write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["pwritev", "preadv"])
def test_failing_drive_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(
        ConfigError, match=r"the drive of .* cannot be measured \(Input/output error\); give another"
    ):
        tiny_drive(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_directory_that_is_missing_full_or_not_ours_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"nothing cannot be measured .*No such file.*--path"):
        tiny_drive(tmp_path / "nothing")
    monkeypatch.setattr("megatrain.doctor.drive.free_bytes", lambda _: 1 << 19)
    with pytest.raises(ConfigError, match=r"not enough space is free: .*1048576 bytes are needed"):
        tiny_drive(tmp_path)
    monkeypatch.undo()

    def deny(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", deny)
    with pytest.raises(ConfigError, match=r"cannot be measured .*Permission denied"):
        tiny_drive(tmp_path)


def test_shares_of_copies_follow_from_the_rates() -> None:
    rates = CopyRates(h2d_locked=50.0, d2h_locked=30.0, h2d_pageable=10.0, d2h_pageable=6.0, both=60.0)
    assert (rates.both_share, rates.pageable_share) == (0.75, 0.2)
    assert replace(rates, both=100.0).both_share == 1.0, "noise is no speed-up"


@pytest.mark.parametrize(("can", "limit", "found"), [(5, 16, 4), (99, 16, 16), (0, 16, 0), (99, 0.5, 0)])
def test_lockable_memory_is_doubled_until_it_fails(can: int, limit: float, found: int) -> None:
    gib = 1 << 30
    assert lockable_bytes(int(limit * gib), lambda nbytes: nbytes <= can * gib) == found * gib


def test_threads_are_doubled_up_to_the_cores() -> None:
    assert [list(thread_counts(cores)) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux binds threads")
def test_memory_is_measured_on_the_cores_of_its_node_and_the_caller_keeps_its_own() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    assert memory_rate(one, num_threads=2, nbytes=1 << 16, seconds=0.0) > 0
    assert os.sched_getaffinity(0) == before


def test_bench_makes_a_machine_that_reads_back(tmp_path: Path) -> None:
    bench = run_bench(torch.device("cpu"), tmp_path, replace(TINY, overhead_layers=4))
    assert list(tmp_path.iterdir()) == []
    assert bench.launch_s is not None
    assert set(bench.rates.update_params_per_s) == set(thread_counts(worker_threads()))
    spec = machine_of(bench, tmp_path)
    assert spec.is_cpu
    assert spec.launch_s == bench.launch_s
    assert spec.device_bytes is None
    assert spec.pageable_share == 1.0, "nothing is locked without a GPU"
    assert spec.drives is not None
    save_machine(spec, tmp_path / "mine.json")
    assert load_machine(tmp_path / "mine.json") == spec


def test_kept_rates_are_used_and_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = machine_of(run_bench(torch.device("cpu"), None, TINY), None)
    marked = replace(spec, h2d_bytes_per_s=12345.0)
    keep(tmp_path / "machine.json", marked, tmp_path)
    assert this_machine(tmp_path / "machine.json").h2d_bytes_per_s == 12345.0
    measured: list[Path | None] = []

    def measure(device: torch.device, path: Path | None, _: Sizes, *, how: str) -> Bench:
        measured.append(path)
        return run_bench(device, path, TINY, how=how)

    monkeypatch.setattr("megatrain.doctor.machine_spec.run_bench", measure)
    assert this_machine(tmp_path / "other.json").sources["matmul_flops_per_s"].endswith("quickly")
    assert this_machine(None).drives is None
    found = this_machine(tmp_path / "machine.json", tmp_path)
    assert found.drives is not None, "kept rates that know no drive do not do where one is asked for"
    assert measured == [None, None, tmp_path]
