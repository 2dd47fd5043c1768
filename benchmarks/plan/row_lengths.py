"""Rows of 131,072 to 2,097,152 tokens, planned: which fit today, how fast they are, and what is full.

    python -m benchmarks.plan.row_lengths [--out FILE] [--page FILE]

Nothing is measured: every figure is what `megatrain plan` finds for a machine file, in bf16 with fp32 masters
and moments, clipped, in steps of one row. It passes in tiles of 4,096 tokens: rows of more than 131,072 do so
by default, and those of 131,072 with `train.tile_tokens`. Each speed stands beside a ceiling, which no
schedule is beyond: attention is computed once, the matrix products as often as the plan computes them, at the
rates of the machine file, and nothing else takes any time. `--page docs/planning.md` puts the table into the
page, in the place of the one that is there.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Literal

from megatrain.config.choice import AUTO
from megatrain.config.plan import Plan
from megatrain.config.policies import POLICIES
from megatrain.config.tiles import TILE
from megatrain.hardware import GIB, HardwareSpec, load_machine
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from megatrain.recipes import shapes
from megatrain.train.planning.asking import Reads, ask
from megatrain.train.planning.gpus import of_ranks
from megatrain.train.planning.longest.find import fullest_tier

LENGTHS = tuple(1 << power for power in range(17, 22))
MODELS = ("llama-8b", "qwen-32b")
MACHINES = ("rtx-4090", "h100", "h200")
_TIERS = {"device": "device", "ram": "host", "nvme": "drives"}
_SOURCE = "benchmarks/plan/row_lengths.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A step of one row."""

    seq_len: int
    fits: bool
    tokens_per_s: float | None
    """None if it does not fit, as the next two."""
    ceiling: float | None
    """Tokens per second if attention ran once, and nothing took time beside it and the products."""
    bound: str | None
    tier: str
    """The tier that is fullest, measured by its limit."""
    need_bytes: int
    """Bytes that the plan takes there; if the device cannot hold one backward, what that takes alone."""
    limit_bytes: int
    working_bytes: int
    """Of the device, for the backward of one layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A model on a machine."""

    model: str
    machine: str
    drives: bool
    """Whether it has the drives of its file; otherwise it has none."""
    cells: tuple[Cell, ...]


def rows() -> Iterator[Row]:
    """Yield all rows of the table."""
    for model in MODELS:
        for machine in MACHINES:
            for drives in (True, False):
                yield row(model, machine, drives=drives)


def row(model: str, machine: str, *, drives: bool) -> Row:
    """Plan a model on a machine for every length."""
    spec = load_machine(machine)
    spec = spec if drives else replace(spec, drives=None)
    cells = tuple(cell(model, spec, length) for length in LENGTHS)
    return Row(model=model, machine=machine, drives=drives, cells=cells)


def request(
    shape: Path, spec: HardwareSpec, length: int, *, tile_tokens: int | Literal["auto"] = AUTO
) -> Request:
    """Return what is asked of the planner for a step of one row of a model with this configuration."""
    train = {"micro_batch_size": 1, "tokens_per_step": length, "tile_tokens": tile_tokens}
    raw = {"data": {"seq_len": length}, "train": train}
    asked = ask(raw, spec, source=_SOURCE, hf_config=shape, reads=Reads.NONE, beyond_context=True)
    return of_ranks(asked.request, 1)


def cell(model: str, spec: HardwareSpec, length: int) -> Cell:
    """Plan a step of one row."""
    asked = request(shapes()[model], spec, length, tile_tokens=TILE)
    plan = make_plan(asked)
    tier = fullest_tier(plan)
    need, limit = plan.tier_bytes(tier), plan.limits[tier]
    working = next(pool.nbytes for pool in plan.pools if pool.name.startswith("working memory"))
    if working > plan.limits["device"]:  # whatever the choice puts beside it
        tier, need, limit = "device", working, plan.limits["device"]
    return Cell(
        seq_len=length,
        fits=plan.fits,
        tokens_per_s=plan.tokens_per_s if plan.fits else None,
        ceiling=ceiling(asked, plan) if plan.fits else None,
        bound=plan.bound if plan.fits else None,
        tier=tier,
        need_bytes=need,
        limit_bytes=limit,
        working_bytes=working,
    )


def ceiling(asked: Request, plan: Plan) -> float:
    """Return the tokens per second of attention once and products as planned, at the machine's rates."""
    rates, anatomy = asked.step(plan.choice).rates, asked.anatomy
    flops = anatomy.head_forward.matmul_flops + anatomy.head_backward.matmul_flops
    attention_s = 0.0
    for layer, policy in zip(anatomy.layers, plan.choice.activations, strict=True):
        again = layer.rerun(POLICIES[policy])
        flops += layer.forward.matmul_flops + layer.backward.matmul_flops + again.matmul_flops
        attention_s += rates.attention_s(layer.forward) + rates.attention_backward_s(layer.backward)
    return anatomy.tokens / (flops / rates.matmul_flops_per_s + attention_s)


def table(found: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table in Markdown; rows that differ by their drives alone are one."""
    heads = [f"{length:,}" for length in LENGTHS]
    yield f"| model | machine | drives | {' | '.join(heads)} |"
    yield f"|---|---|---|{'---|' * len(heads)}"
    lines: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for one in found:
        cells = tuple(shown(cell) for cell in one.cells)
        lines.setdefault((one.model, one.machine, cells), []).append("yes" if one.drives else "no")
    for (model, machine, cells), drives in lines.items():
        yield f"| {model} | {machine} | {' or '.join(drives)} | {' | '.join(cells)} |"


def shown(cell: Cell) -> str:
    """Return the text of a cell: the speed with its share of the ceiling, or what does not fit."""
    if cell.tokens_per_s is None or cell.ceiling is None:
        return f"{_TIERS[cell.tier]} {cell.need_bytes / GIB:,.0f} of {cell.limit_bytes / GIB:,.0f} GiB"
    return f"{cell.tokens_per_s:,.0f} ({cell.tokens_per_s / cell.ceiling:.0%})"


def with_table(page: str, lines: Sequence[str]) -> str:
    """Return a page with this table in the place of the one with the same heads.

    Raises:
        ValueError: The page has no such table, or more than one.
    """
    before, found, behind = page.partition(f"{lines[0]}\n")
    if not found or lines[0] in behind:
        raise ValueError("the page is to have one table with these heads")
    old = list(takewhile(lambda line: line.startswith("|"), behind.splitlines(keepends=True)))
    return before + "\n".join(lines) + "\n" + behind[len("".join(old)) :]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write figures and table where `--out` and `--page` say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the figures")
    parser.add_argument("--page", type=Path, help="page in Markdown with the table")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = list(rows())
    lines = list(table(found))
    print("\n".join(lines))
    if options.page is not None:
        options.page.write_text(with_table(options.page.read_text(encoding="utf-8"), lines), encoding="utf-8")
    if options.out is not None:
        body = {"benchmark": "row lengths", "rows": [asdict(one) for one in found]}
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps({"benchmark": "row lengths", "rows": len(found)}))


if __name__ == "__main__":
    main()
