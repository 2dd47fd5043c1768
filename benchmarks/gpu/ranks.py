"""Ranks with a device each: one, two and four of them train a tiny model to the same bits.

    python -m benchmarks.gpu.ranks RANK SIZE FOLDER DEVICE SETTINGS

is one of them. Never run on a GPU. On the test device, whose tensors Gloo cannot take, two share the device.
So they do where there is one GPU: NCCL refuses two ranks of one host on one device, so each is told that it
is on a host of its own (NCCL_HOSTID), and they speak through sockets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import Record, deterministic, device_of, use_device

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = ("fp32", "bf16")
TIMEOUT_S = 60.0
SHARED = ("cpu", "host")
"""Devices that several ranks may share."""


def ranks(record: Record, is_dry: bool) -> None:
    """Hold ranks that fetch whole blocks, and ranks that gather them, against one."""
    import torch

    device = device_of(is_dry).type
    count = 2 if device in SHARED else torch.accelerator.device_count()
    record.add(num_devices=count)
    for precision in PRECISIONS[: 1 if is_dry or count < 2 else None]:
        alone = run(device, 1, precision=precision)
        for size in (2, 4)[: 1 + (count >= 4)]:
            for gathers in (False, True):
                found = run(device, size, precision=precision, gathers=gathers)
                equal = found == alone * size
                row = {"precision": precision, "size": size, "gathers": gathers, "is_bitwise": equal}
                record.append("runs", row)
                assert equal, f"{size} ranks differ from one: {found}, {alone[0]}"
    shared = " on one GPU" if count < 2 else ""
    record.add(
        gist=f"{len(record.values['runs'])} runs of several ranks{shared} equal one rank's, bit for bit"
    )


def run(device: str, size: int, **settings: Any) -> list[Any]:
    """Train on so many ranks, and return what each has found."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(Path(folder), device, size, settings)


def _run(folder: Path, device: str, size: int, settings: dict[str, Any]) -> list[Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.ranks"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder), device, json.dumps(settings)],
            cwd=ROOT,
            env={**os.environ, **host_of(device, rank, size)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate()[1] for process in started]
    finally:
        for process in started:
            process.kill()
    failed = [text for process, text in zip(started, said, strict=True) if process.returncode]
    assert not failed, failed[0][-2000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def host_of(device: str, rank: int, size: int) -> dict[str, str]:
    """Return what lets NCCL take a rank for one of another host, where ranks share a GPU; else nothing."""
    import torch

    if device in SHARED or torch.accelerator.device_count() >= size:
        return {}
    return {"NCCL_HOSTID": f"host-of-rank-{rank}"}


def main(rank: int, size: int, folder: Path, device: str, settings: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from megatrain.distributed.meeting import backend_of
    from megatrain.distributed.ranks import Ranks
    from tests.distributed.training import train

    use_device(device)
    device_of(is_dry=True)
    backend = "cpu:gloo"
    if device not in SHARED:
        backend = backend_of(device)
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    torch.set_num_threads(1)
    joined: Ranks | None = None
    if size > 1:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        joined = Ranks(store, TIMEOUT_S)
    with deterministic(), joined or nullcontext():
        found = train(joined, device=device, **settings)
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        if joined is not None:
            joined.meet()
    if joined is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
