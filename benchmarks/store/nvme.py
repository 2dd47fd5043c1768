"""Streaming reads and writes of state on a drive, against fio, taking turns in one run.

    python -m benchmarks.store.nvme [--directory DIR] [--gib N] [--rounds N] [--out FILE]

Ours is what training does: extents of 64 MiB through `StripedStore`, with checksums made and verified, and
three buffers in flight; a round of writes ends with fdatasync. fio does the same amount with direct I/O, the
same block size and `end_fsync`; each reads what it wrote in the same round. Of io_uring and libaio at depth
16, with one job and with four, and plain calls in four threads, each direction has what was fastest in a
trial. Where there is no fio, a plain `preadv` loop and `dd` with direct I/O take its place, and the result
says so.

Both take turns, in changing order, because the rate of a shared drive drifts within minutes; the ratio is the
median of the ratios within a round. Aim: 0.90.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import emit, hardware, spread
from megatrain.layout.drive_chunks import CHUNK_BYTES
from megatrain.store.arena import Arena
from megatrain.store.drives.drive import threads_per_drive
from megatrain.store.drives.striped import Extent, StripedStore, wait

EXTENT_BYTES = 64 << 20
NUM_BUFFERS = 3
Way = tuple[str, int, int]
"""How fio does it: engine, depth, jobs."""
WAYS: list[Way] = [
    (engine, depth, jobs)
    for engine, depth, counts in (("io_uring", 16, (1, 4)), ("libaio", 16, (1, 4)), ("psync", 1, (4,)))
    for jobs in counts
]


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--directory", default=".", help="on the drive to measure")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state (one copy)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="also write the result to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="nvme-") as name:
        emit(measure(Path(name), int(options.gib * (1 << 30)), options.rounds), options.out)


def measure(root: Path, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Measure both sides in turns."""
    count = max(2, num_bytes // EXTENT_BYTES)
    store = StripedStore([root / "ours"], [Extent(f"extent {n}", EXTENT_BYTES) for n in range(count)])
    store.create()
    num_bytes = count * EXTENT_BYTES
    arena = Arena(NUM_BUFFERS * EXTENT_BYTES)
    buffers = [arena.view(torch.uint8, n * EXTENT_BYTES, EXTENT_BYTES) for n in range(NUM_BUFFERS)]
    for number, buffer in enumerate(buffers):  # no zeros: a drive may have a shortcut for them
        buffer.copy_(torch.randint(256, (EXTENT_BYTES,), dtype=torch.uint8).add_(number))
    sides: dict[str, dict[str, Callable[[], float]]] = {
        "ours": {
            "write": lambda: ours(store, buffers, num_bytes, "write"),
            "read": lambda: ours(store, buffers, num_bytes, "read"),
        },
        **rivals(root, num_bytes),
    }
    rates: dict[str, dict[str, list[float]]] = {side: {"write": [], "read": []} for side in sides}
    for side in sides.values():  # what is written first takes new blocks of the drive
        side["write"]()
        side["write"]()
    for number in range(rounds):
        for direction in ("write", "read"):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                rates[side][direction].append(sides[side][direction]())
                print(
                    f"round {number} {direction:5} {side:12} {rates[side][direction][-1]:.2f} GB/s",
                    flush=True,
                )
    is_direct = store.is_direct
    store.remove()
    return summarise(rates, is_direct, num_bytes)


def ours(store: StripedStore, buffers: list[torch.Tensor], num_bytes: int, direction: str) -> float:
    """Return GB/s of streaming all extents through the buffers, each waited for before it is used again."""
    pending: deque[tuple[int, list[Future[None]]]] = deque()
    start_s = time.perf_counter()
    submit = store.submit_read if direction == "read" else store.submit_write

    def finish() -> None:
        extent, futures = pending.popleft()
        wait(futures)
        if direction == "write":
            store.settle(extent)

    for extent in range(num_bytes // EXTENT_BYTES):
        if len(pending) == len(buffers):
            finish()
        pending.append((extent, submit(extent, buffers[extent % len(buffers)])))
    while pending:
        finish()
    if direction == "write":
        store.commit(1, {})  # fdatasync and the record
    return num_bytes / (time.perf_counter() - start_s) / 1e9


def rivals(root: Path, num_bytes: int) -> dict[str, dict[str, Callable[[], float]]]:
    """Return fio, or, where there is none, a plain loop and dd."""
    file = root / "theirs"
    if shutil.which("fio"):
        best = {
            "write": fastest(lambda way: fio(file, num_bytes, "write", way)),
            "read": fastest(lambda way: fio(file, num_bytes, "read", way)),
        }
        print(f"fio's fastest ways: {best}", flush=True)
        return {
            "fio": {
                "write": lambda: fio(file, num_bytes, "write", best["write"]),
                "read": lambda: fio(file, num_bytes, "read", best["read"]),
            }
        }
    return {
        "preadv loop": {
            "write": lambda: loop(file, num_bytes, "write"),
            "read": lambda: loop(file, num_bytes, "read"),
        },
        "dd": {"write": lambda: dd(file, num_bytes, "write"), "read": lambda: dd(file, num_bytes, "read")},
    }


def fastest(run: Callable[[Way], float]) -> Way:
    """Return the way that is fastest in the better of two runs; containers often forbid io_uring."""
    rates: dict[Way, float] = {}
    for way in WAYS * 2:
        with contextlib.suppress(subprocess.CalledProcessError):
            rates[way] = max(rates.get(way, 0.0), run(way))
    return max(rates, key=lambda way: rates[way])


def fio(file: Path, num_bytes: int, direction: str, way: Way) -> float:
    """Return GB/s by fio's own clock."""
    engine, depth, jobs = way
    share = num_bytes // jobs
    done = subprocess.run(
        [
            "fio",
            "--name=state",
            f"--filename={file}",
            f"--rw={direction}",
            f"--size={share}",
            f"--offset_increment={share}",
            f"--numjobs={jobs}",
            "--thread",
            "--group_reporting",
            f"--bs={CHUNK_BYTES}",
            f"--ioengine={engine}",
            f"--iodepth={depth}",
            "--direct=1",
            "--end_fsync=1",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    seconds = job["job_runtime"] / jobs / 1e3
    return job[direction]["io_bytes"] / max(seconds, 1e-3) / 1e9


def loop(file: Path, num_bytes: int, direction: str) -> float:
    """Return GB/s of one thread that reads or writes one chunk after the other, directly."""
    buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    start_s = time.perf_counter()
    for offset in range(0, num_bytes, CHUNK_BYTES):
        if direction == "read":
            os.preadv(descriptor, [buffer], offset)
        else:
            os.pwritev(descriptor, [buffer], offset)
    if direction == "write":
        os.fdatasync(descriptor)
    seconds = time.perf_counter() - start_s
    os.close(descriptor)
    return num_bytes / seconds / 1e9


def dd(file: Path, num_bytes: int, direction: str) -> float:
    """Return GB/s of dd with direct I/O."""
    paths = [f"if={file}", "of=/dev/null", "iflag=direct"]
    if direction == "write":
        paths = ["if=/dev/zero", f"of={file}", "oflag=direct", "conv=notrunc,fdatasync"]
    start_s = time.perf_counter()
    count = num_bytes // CHUNK_BYTES
    subprocess.run(["dd", *paths, f"bs={CHUNK_BYTES}", f"count={count}"], capture_output=True, check=True)
    return num_bytes / (time.perf_counter() - start_s) / 1e9


def summarise(rates: dict[str, dict[str, list[float]]], is_direct: bool, num_bytes: int) -> dict[str, Any]:
    """Return the medians, and the ratios within the rounds."""
    others = [side for side in rates if side != "ours"]
    ratios = {
        f"{direction}_over_{side.split()[0]}": statistics.median(
            mine / its for mine, its in zip(rates["ours"][direction], rates[side][direction], strict=True)
        )
        for side in others
        for direction in ("write", "read")
    }
    return {
        **ratios,
        "rates_gb_per_s": {
            side: {direction: spread(values) for direction, values in by.items()}
            for side, by in rates.items()
        },
        "rounds_gb_per_s": rates,
        "config": {
            "bytes": num_bytes,
            "chunk_bytes": CHUNK_BYTES,
            "threads_per_direction": threads_per_drive(1),
            "direct": is_direct,
            "rival": ", ".join(others) if shutil.which("fio") else f"no fio here: {', '.join(others)}",
        },
        "hardware": hardware(),
    }


if __name__ == "__main__":
    main()
