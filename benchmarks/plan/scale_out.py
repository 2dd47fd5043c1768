"""What the planner says of many GPUs, with peers and network as fast as they are and half as fast: on paper.

    python -m benchmarks.plan.scale_out [--out FILE]

Nothing is measured. Every GPU takes the same tokens of a step; efficiency is against one GPU of the same
node. What is not in it: what NCCL's kernels take of a GPU's own processors, ranks that wait for a slow one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from megatrain.config.choice import StepBatch
from megatrain.hardware import HardwareSpec, load_machine
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.search.request import Request
from megatrain.train.planning.scale import Row, scale

_SEQ_LEN = 4096
_MODELS = {
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256),
    "Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128256),
}
_FACTORS = {"as they are": (1.0, 1.0), "peers halved": (0.5, 1.0), "network halved": (1.0, 0.5)}
_FACTORS |= {"both halved": (0.5, 0.5)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on more and more GPUs of a machine."""

    machine: str
    model: str
    micro_batches: int
    """Of 4,096 tokens, for each GPU."""
    counts: tuple[tuple[int, int], ...]
    ram_bytes: int | None = None
    """None: as the machine's file says."""
    rates: str = "as they are"

    @property
    def spec(self) -> HardwareSpec:
        """The machine with its rates scaled."""
        spec = load_machine(self.machine)
        peers, network = _FACTORS[self.rates]
        if spec.peer_bytes_per_s is not None:
            spec = replace(spec, peer_bytes_per_s=peers * spec.peer_bytes_per_s)
        if spec.network_bytes_per_s is not None:
            spec = replace(spec, network_bytes_per_s=network * spec.network_bytes_per_s)
        return spec if self.ram_bytes is None else spec.with_ram(self.ram_bytes)

    @property
    def request(self) -> Request:
        """What one GPU is asked for."""
        batch = StepBatch(micro_batch_size=1, seq_len=_SEQ_LEN, num_micro_batches=self.micro_batches)
        return Request(spec=self.spec, anatomy=_anatomy(self.model), batch=batch, compiles=True)


_HGX = ((1, 1), (8, 1), (8, 8), (8, 128))
CASES = (
    *(
        Case(
            machine="8xh100",
            model="Llama-3.1-70B",
            micro_batches=32,
            counts=_HGX,
            ram_bytes=3 * 10**12,
            rates=rates,
        )
        for rates in _FACTORS
    ),
    Case(machine="8xh100", model="Llama-3.1-70B", micro_batches=32, counts=((1, 1), (8, 1), (8, 128))),
    Case(machine="8xh100", model="Llama-3.1-70B", micro_batches=16, counts=((1, 1), (8, 1), (8, 128))),
    Case(machine="8xh200", model="Llama-3.1-70B", micro_batches=16, counts=((1, 1), (8, 1), (8, 128))),
    Case(machine="8xb200", model="Llama-3.1-70B", micro_batches=16, counts=((1, 1), (8, 1), (8, 128))),
    Case(machine="4xrtx-4090", model="Llama-3.1-8B", micro_batches=32, counts=((1, 1), (2, 1), (4, 1))),
    Case(machine="2xdgx-spark", model="Llama-3.1-8B", micro_batches=32, counts=((1, 1), (1, 2))),
)


@cache
def _anatomy(model: str) -> Anatomy:
    hidden, inner, layers, heads, groups, vocab = _MODELS[model]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocab,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=False,
    )
    return count_anatomy(config, micro_batch_size=1, seq_len=_SEQ_LEN, precision="bf16")


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Return the rows of a case as plain values."""
    return [_plain(row) for row in scale(case.request, case.counts)]


def _plain(row: Row) -> dict[str, Any]:
    plan = row.plan
    return {
        "gpus": row.num_ranks,
        "fits": plan.fits,
        "tokens_per_s": plan.tokens_per_s,
        "efficiency": row.efficiency,
        "bound": plan.bound,
        "boundaries": plan.choice.boundaries,
        "host_bytes_per_node": plan.tier_bytes("ram"),
        "bounds_s": dict(plan.bounds_s),
        "step_s": plan.step_s,
    }


def lines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table in Markdown."""
    heads = "machine, host memory", "model, tokens per GPU", "peers and network", "GPUs", "tokens/s"
    yield f"| {' | '.join(heads)} | efficiency | bound |"
    yield "|---|---|---|---|---|---|---|"
    for one in results:
        for row in one["rows"]:
            rate = (
                f"{row['tokens_per_s']:,.0f} | {row['efficiency']:.3f}" if row["fits"] else "does not fit |"
            )
            yield (
                f"| {one['machine']}, {one['ram_bytes'] / 1e12:.3g} TB | {one['model']}, "
                f"{one['tokens_per_gpu']:,} | {one['rates']} | {row['gpus']:,} | {rate} | {row['bound']} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan every case, and write the JSON where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    results = [
        {
            "machine": case.machine,
            "ram_bytes": case.spec.host_bytes,
            "model": case.model,
            "tokens_per_gpu": case.micro_batches * _SEQ_LEN,
            "rates": case.rates,
            "rows": rows_of(case),
        }
        for case in CASES
    ]
    print("\n".join(lines(results)))
    if options.out is not None:
        options.out.write_text(json.dumps({"benchmark": "scale out", "cases": results}, indent=1) + "\n")
    print(json.dumps({"benchmark": "scale out", "cases": len(results)}))


if __name__ == "__main__":
    main()
