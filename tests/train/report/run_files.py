"""Run directories written by hand, so that what is read from them is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatrain.train.records.events import EventLog

CONFIG = """\
model: {path: some/model, init: pretrained}
data: {path: [/home/somebody/text.jsonl], seq_len: 128}
train: {steps: 100, micro_batch_size: 2, grad_accumulation: 4, precision: bf16}
optim: {lr: LR, schedule: cosine}
memory: {tiers: {ram: null, nvme: [/mnt/somebody]}}
log: {every: 1, webhook: "https://hooks.example/secret-token"}
out: OUT
"""

PLAN: dict[str, Any] = {
    "step_s": 0.5,
    "tokens_per_s": 2048.0,
    "bound": "compute",
    "bounds_s": {"compute": 0.45},
    "host_plane_bytes": 3 * 2**30,
    "model": {"num_params": 250_000_000},
    "limits": {"device": 2**33, "ram": 2**35},
    "pools": [
        {"tier": "device", "name": "slots", "nbytes": 2**30},
        {"tier": "device", "name": "working memory", "nbytes": 2**29},
        {"tier": "ram", "name": "exp_avg", "nbytes": 2**30},
        {"tier": "ram", "name": "working", "nbytes": 2**31},
    ],
    "timeline": [["fetch", "fetch", 0.0, 0.1], ["compute", "forward", 0.1, 0.3]],
}


def write_run(
    path: Path,
    *,
    num_rows: int = 20,
    lr: str = "1e-4",
    loss: Callable[[int], float] = lambda step: 4.0 - 0.1 * step,
    events: Sequence[tuple[str, int, dict[str, Any]]] = (("start", 0, {"steps": 100}),),
    plan: dict[str, Any] | None = None,
    **columns: int,
) -> Path:
    """Write a run of 1,024 tokens a step, half a second each but for the first, with these `columns` too."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.replace("LR", lr).replace("OUT", str(path)))
    (path / "env.json").write_text(json.dumps({"gpu": "A Card", "cpus": 8, "versions": {"torch": "2.13"}}))
    (path / "plan.json").write_text(json.dumps(PLAN if plan is None else plan))
    rows = [
        {
            "step": step,
            "loss": loss(step),
            "grad_norm": 0.5,
            "lr": 1e-4,
            "tokens": 1024 * step,
            "targets": 1000 * step,
            "tokens_per_s": 1024 / (9.0 if step == 1 else 0.5),
            "seconds": 9.0 if step == 1 else 0.5,
            "host_bytes": 3 * 2**30,
            "device_bytes": 2**30 + step,
            "bound": "copies" if step % 4 == 0 else "compute",
            "waits": {"compute<-fetch slot": 0.125},
            "lane_seconds": {"compute": 0.375, "fetch": 0.25},
            **columns,
        }
        for step in range(1, num_rows + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with EventLog(path / "events.jsonl") as log:
        for event, step, values in events:
            log.write(event, step, **values)  # type: ignore[arg-type]
    return path
