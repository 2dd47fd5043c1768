"""A grid of plans, 4 models x 8 machines x 4 batches: is any of them slower than it was?

    python -m benchmarks.plan.grid [--against FILE] [--only WORD ...]
    python -m benchmarks.plan.grid --out FILE [--only WORD ...]

The first command compares with the committed file, and ends with status 1 if a plan is slower; the second one
makes the rows that a file lacks, and may be stopped at any time. Nothing is measured: every row is what
`megatrain plan` finds for a machine file, in bf16 with fp32 moments, gradients clipped. A plan is slower if
its tokens per second are fewer by more than 0.1 %, or if it no longer fits. A search ends after so many
operations, not seconds, so a row is the same on every machine.

The models are Llama-3.1 8B and Qwen2.5 32B as the package has them, a dense one of 120B and Llama-3.1 405B;
steps have 8 thousand, 131 thousand and 590 thousand tokens, and a million in rows of 128k. Left out are steps
whose micro-batches the GPUs cannot share out (8 on 32), 405B on a node without drives, which cannot fit, and
120B and 405B on consumers' GPUs, where nobody would wait for it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from megatrain.config.choice import StepBatch
from megatrain.config.plan import Plan
from megatrain.hardware import HardwareSpec, load_machine
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.search.planner import plan_with_open_runs
from megatrain.plan.search.request import Request
from megatrain.recipes import shapes
from megatrain.train.planning.gpus import of_ranks

COMMITTED = Path(__file__).parents[1] / "results/2026-11-25-plan-grid.json"
SLOWER = 0.001
"""By so much of its tokens per second a plan may be slower."""

_DENSE = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 1 << 17}
MODELS: dict[str, str | dict[str, int]] = {
    "8B": "llama-8b",
    "32B": "qwen-32b",
    "120B": {"hidden_size": 10240, "num_hidden_layers": 88, "intermediate_size": 35840,
             "num_attention_heads": 80, **_DENSE},
    "405B": {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248,
             "num_attention_heads": 128, **_DENSE},
}  # fmt: skip
"""By name: a shape of the package, or the settings of a Llama."""

MACHINES: dict[str, dict[str, Any]] = {
    "rtx-5060-ti with drives": {"file": "rtx-5060-ti", "drives": 4 * 10**12},
    "rtx-4090 with drives": {"file": "rtx-4090", "drives": 4 * 10**12},
    "h100": {"file": "h100"},
    "h200": {"file": "h200", "ram": 3 << 39},
    "h200 with drives": {"file": "h200", "drives": 15 * 10**12},
    "4 x rtx-4090": {"file": "4xrtx-4090", "gpus": 4},
    "8 x h100": {"file": "8xh100", "gpus": 8},
    "4 nodes of 8 x h100": {"file": "8xh100", "gpus": 8, "nodes": 4, "ram": 3 * 10**12},
}
"""By name: the machine file, GPUs of a node and nodes if not 1, bytes of host memory of a node if not the
file's, and of drives if there are any."""

BATCHES: dict[str, tuple[int, int, int]] = {
    "8k": (1, 1024, 8),
    "131k": (2, 2048, 32),
    "590k": (1, 2048, 288),
    "rows of 128k": (1, 1 << 17, 8),
}
"""By name: rows of a micro-batch, tokens of a row, micro-batches of the step of all ranks."""

_SMALL = ("rtx-5060-ti with drives", "rtx-4090 with drives", "4 x rtx-4090")


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield model, machine and batch of every row."""
    for model in MODELS:
        for machine, about in MACHINES.items():
            cannot_fit = model == "405B" and "drives" not in about and "nodes" not in about
            if cannot_fit or (model in ("120B", "405B") and machine in _SMALL):
                continue
            gpus, nodes = _ranks(machine)
            for batch, (_, _, count) in BATCHES.items():
                if count % (gpus * nodes) == 0:
                    yield model, machine, batch


def plan(model: str, machine: str, batch: str) -> Plan:
    """Plan a row: all that this script asks of the planner."""
    gpus, nodes = _ranks(machine)
    size, seq_len, count = BATCHES[batch]
    request = Request(
        spec=_spec(machine),
        anatomy=_anatomy(model, size, seq_len),
        batch=StepBatch(
            micro_batch_size=size, seq_len=seq_len, num_micro_batches=count, num_runs=gpus * nodes
        ),
        compiles=True,
    )
    return plan_with_open_runs(of_ranks(request, gpus * nodes, nodes))


def _ranks(machine: str) -> tuple[int, int]:
    """Return the GPUs of a node, and the nodes."""
    return MACHINES[machine].get("gpus", 1), MACHINES[machine].get("nodes", 1)


def _spec(machine: str) -> HardwareSpec:
    about = MACHINES[machine]
    spec = load_machine(about["file"])
    spec = spec.with_drive_bytes(about["drives"]) if "drives" in about else replace(spec, drives=None)
    spec = spec.with_ram(about["ram"]) if "ram" in about else spec
    return spec.with_ranks(*_ranks(machine))


@cache
def _anatomy(model: str, size: int, seq_len: int) -> Anatomy:
    return count_anatomy(config_of(model), micro_batch_size=size, seq_len=seq_len, precision="bf16")


def config_of(model: str) -> PretrainedConfig:
    """Return a model's configuration."""
    shape = MODELS[model]
    if isinstance(shape, str):
        return AutoConfig.for_model(**json.loads(shapes()[shape].read_text()))
    return LlamaConfig(**shape, tie_word_embeddings=False)


def plain(found: Plan) -> dict[str, Any]:
    """Return what is kept of a plan."""
    choice: dict[str, Any] = asdict(found.choice)
    choice["activations"] = Counter(found.choice.activations)
    choice["gradients"] = Counter(found.choice.gradients)
    choice["tiers"] = sorted(map(list, found.choice.tiers))
    return {
        "fits": found.fits,
        "problem": found.problem or None,
        "tokens_per_s": found.tokens_per_s,
        "step_s": found.step_s,
        "bound": found.bound,
        "choice": choice,
        "bytes": {tier: found.tier_bytes(tier) for tier in ("device", "ram", "nvme")},
    }


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say how a plan is worse than before; empty: it is not."""
    if not before["fits"]:
        return ""
    if not now["fits"]:
        return f"no longer fits: {now['problem']}"
    ratio = now["tokens_per_s"] / before["tokens_per_s"]
    return "" if ratio >= 1 - SLOWER else f"{ratio:.4f} of its tokens per second"


def name_of(row: Sequence[str]) -> str:
    """Return the name of a row."""
    return ", ".join(row)


def make(out: Path, chosen: Sequence[tuple[str, str, str]]) -> None:
    """Plan the rows that a file lacks, and write it after each."""
    kept: dict[str, Any] = (
        json.loads(out.read_text()) if out.exists() else {"benchmark": "plan grid", "rows": {}}
    )
    for row in chosen:
        name = name_of(row)
        if name not in kept["rows"]:
            began = time.process_time()
            kept["rows"][name] = plain(plan(*row))
            print(f"{told(name, kept['rows'][name])}{time.process_time() - began:>8.1f} CPU s", flush=True)
            out.write_text(json.dumps(kept, indent=1) + "\n")


def told(name: str, found: Mapping[str, Any]) -> str:
    """Return the line of a row."""
    rate = f"{found['tokens_per_s']:>12,.0f} tokens/s" if found["fits"] else f"{'does not fit':>21}"
    return f"{name:<42}{rate}  {found['bound']:<20}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make rows, or compare with those of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="file that gets the rows that it lacks")
    parser.add_argument("--against", type=Path, default=COMMITTED, help="file that is compared with")
    parser.add_argument(
        "--only", action="append", default=[], help="rows whose name has this; all of several"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = [row for row in rows() if all(word in name_of(row) for word in options.only)]
    if options.out is not None:
        return make(options.out, chosen)
    before = json.loads(options.against.read_text())["rows"]
    slower: dict[str, str] = {}
    for row in chosen:
        if (name := name_of(row)) in before:
            now = plain(plan(*row))
            worse = compare(before[name], now)
            print(f"{told(name, now)}{worse and f'SLOWER: {worse}'}", flush=True)
            slower |= {name: worse} if worse else {}
    print(json.dumps({"benchmark": "plan grid", "slower": slower}))
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
