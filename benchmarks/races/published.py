"""Our plans beside the best that rivals have published, on the same card: arithmetic beside measurements.

    python -m benchmarks.races.published [--out FILE]

Of each rival on each card and model, the published row of 1,024 tokens with the most tokens per second
(RoundPipe published 2,048). Ours is what `megatrain plan` prints for that model, length and step: with fp32
masters, moments and sums, clipped, without drives, and with 512 GiB of host memory (768 GiB for 32B), of
which it says what it takes. Rivals store and sum in other formats, which are named: a state of half the bytes
needs half the host memory. Nothing of ours in this table was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.rows import Row, config_of, rows
from benchmarks.report import emit, hardware

SEQ_LENS = (1024, 2048)
HOST = {"Qwen2.5-32B": "768GiB", "Qwen3-32B": "768GiB"}
"""By model, the host memory of our plan; others: 512 GiB."""

FORMATS = {
    "ml_dataflow": "bf16 weights, moments and sums",
    "dataflow, July 2026": "bf16 weights, moments and sums",
    "llmq": "bf16 weights, moments and sums",
    "RoundPipe": "fp16 products summed in fp16; fp32 masters and moments, one step late",
    "ZeRO-3 offload": "bf16 products; fp32 masters and moments",
    "ZeRO-3 offload, bf16 masters": "bf16 masters and sums; fp32 moments",
    "MegaTrain": "bf16 masters; fp32 moments",
}
"""By system, what it stores and sums in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A published row beside our plan."""

    row: Row
    formats: str
    fits: bool
    tokens_per_s: float
    bound: str
    policy: str
    host_bytes: float
    """What the plan takes of host memory."""

    @property
    def ratio(self) -> float:
        """Ours, planned, over the rival's, measured."""
        return self.tokens_per_s / self.row.tokens_per_s


def best_rows() -> Iterator[Row]:
    """Yield the fastest published row of each rival, card and model, one of the model's own depth."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows():
        known = row.system in FORMATS and row.seq_len in SEQ_LENS and not row.layers
        is_scored = not row.left_out or row.system == "RoundPipe"
        key = row.system, row.machine, row.model
        if known and is_scored and (key not in best or row.tokens_per_s > best[key].tokens_per_s):
            best[key] = row
    yield from best.values()


def beside(row: Row) -> Beside:
    """Return a row with what `megatrain plan` says of the same model, length and step on that machine."""
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder) / "config.json"
        shape.write_text(config_of(row).to_json_string(use_diff=False))
        asked = ["--hf-config", str(shape), "--machine", row.machine, "--seq-len", str(row.seq_len)]
        asked += ["--tokens-per-step", str(row.tokens), "--nvme", "0", "--json"]
        asked += ["--ram", HOST.get(row.model, "512GiB")]
        command = [sys.executable, "-m", "megatrain", "plan", *asked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"megatrain plan ended with {done.returncode} for {row}: {done.stderr}")
    plan = json.loads(done.stdout)
    return Beside(
        row=row,
        formats=FORMATS[row.system],
        fits=plan["fits"],
        tokens_per_s=plan["tokens_per_s"] if plan["fits"] else 0.0,
        bound=str(plan["bound"]),
        policy=_policies(plan) if plan["fits"] else "",
        host_bytes=sum(pool["nbytes"] for pool in plan["pools"] if pool["tier"] == "ram"),
    )


def _policies(plan: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in plan["layers"])


def table(found: Sequence[Beside]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    heads = "card", "model", "tokens per step", "rival", "its numbers", "its tokens/s, measured"
    yield f"| {' | '.join(heads)} | ours, planned | ratio | host GiB | bound by | layers |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for one in sorted(found, key=lambda one: (one.row.machine, one.row.model)):
        row = one.row
        planned = "does not fit | |"
        if one.fits:
            planned = f"{one.tokens_per_s:,.0f} | {one.ratio:.2f} | {one.host_bytes / 2**30:.0f}"
        yield (
            f"| {row.machine} | {row.model} | {row.tokens:,} | {row.system} | {one.formats} "
            f"| {row.tokens_per_s:,.0f} | {planned} | {one.bound if one.fits else ''} | {one.policy} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--out", help="file to save the JSON line to")
    options = parser.parse_args(arguments)
    found = []
    for row in best_rows():
        found.append(beside(row))
        print(*list(table(found[-1:]))[2:], flush=True)
    print("\n".join(table(found)))
    emit(
        {
            "benchmark": "published rows beside our plans",
            "what": "theirs measured by them, ours planned: nothing of ours was measured",
            "rows": [asdict(one) | {"ratio": one.ratio} for one in found],
            "hardware": hardware(),
        },
        options.out,
    )


if __name__ == "__main__":
    main()
