"""The field's published claims, planned: what fits which machine, how fast it is, and what it costs.

    python -m benchmarks.plan.claims --configs DIR [--out benchmarks/results]

`DIR` holds one folder with a config.json per model. Nothing is measured here: every figure is arithmetic of
`megatrain plan` on a bundled machine, whose rates are vendors' figures times assumed shares. TB are 10^12
bytes and TiB 2^40. A claim names no batch, so the fastest of 131,072, 32,768 and 8,192 tokens per step that
fits is taken.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.plan import Plan
from megatrain.hardware import HardwareSpec, load_machine
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.model.weights.skeleton import read_config
from megatrain.plan.cost.economics import economics
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request

TOKENS_PER_STEP = (131_072, 32_768, 8_192)
TIB = 1 << 40
GIB = 1 << 30
BUDGET = 10**9
"""Tokens whose cost is shown."""

CLUSTER_GPUS = 8
CLUSTER_USD_PER_GPU_HOUR = 2.8
CLUSTER_MFU = 0.40
CLUSTER_PEAK = 989e12
"""A rented node of H100s: the price of `h100` in its machine file, and the MFU of a good run (assumed)."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line: a model on a machine, and who says what about it."""

    name: str
    source: str
    model: str
    """A folder of the configurations, or `dense:HIDDEN:LAYERS`."""
    spec: HardwareSpec
    clips: bool = True
    precision: str = "bf16"
    seq_len: int = 1024
    tokens_per_step: tuple[int, ...] = TOKENS_PER_STEP
    shares_drives: bool = False
    """State may be on the machine's drives; otherwise it has none."""


MEGATRAIN = "MegaTrain, arXiv 2604.05091 (abstract)"
DESIGN = "a question of this project"


def claims() -> Iterator[Claim]:
    """Yield every claim."""
    h200 = load_machine("h200")
    memories = ((1_500_000_000_000, "1.5 TB (1.36 TiB)"), (3 * TIB // 2, "1.5 TiB (1.65 TB)"))
    for model, name in (("dense:10240:88", "120 B dense"), ("gpt-oss-120b", "gpt-oss-120b")):
        for nbytes, size in memories:
            for clips in (True, False):
                yield Claim(
                    name=f"{name}, H200 + {size}",
                    source=f"{MEGATRAIN}: 120 B on one H200 with 1.5 TB",
                    model=model,
                    spec=h200.with_ram(nbytes),
                    clips=clips,
                )
    b200 = load_machine("b200")
    for clips in (True, False):
        yield Claim(
            name="105 B dense, B200 + 1.5 TB",
            source="Horizon-LM, arXiv 2602.04816, and successors of MegaTrain",
            model="dense:10240:77",
            spec=b200.with_ram(1_500_000_000_000),
            clips=clips,
        )
        yield Claim(
            name="100 B dense in true fp32, B200 + 2 TB",
            source=f"{DESIGN}: fp32 compute, not only fp32 masters",
            model="dense:10240:73",
            spec=b200,
            clips=clips,
            precision="fp32",
        )
    yield from _desktops()
    yield Claim(
        name="7 B at 512k tokens of context, GH200",
        source=f"{MEGATRAIN}: 74 to 88 GB of device memory",
        model="Qwen2.5-7B",
        spec=load_machine("gh200"),
        seq_len=1 << 19,
        tokens_per_step=(1 << 19,),
    )
    yield Claim(
        name="14 B, GH200",
        source=f"{MEGATRAIN}: 264 TFLOP/s, 1.84 times ZeRO-3 with offload",
        model="Qwen2.5-14B",
        spec=load_machine("gh200"),
    )
    for clips in (True, False):
        yield Claim(
            name="405 B, H200 + 1.5 TB + drives",
            source="GreedySnake, arXiv 2512.17570 (175 B on SSD); here a larger model",
            model="Llama-3.1-405B",
            spec=h200.with_drive_bytes(15 * 10**12),
            clips=clips,
            shares_drives=True,
        )
    for layers in (28, 56, 84, 180):
        yield Claim(
            name=f"{layers} layers of width 3,584, H200 + 1.5 TB",
            source=f"{MEGATRAIN}: depth from 28 to 180 layers",
            model=f"dense:3584:{layers}",
            spec=h200,
        )
    yield Claim(
        name="120 B dense, PCIe 6 host + 3 TB",
        source=DESIGN,
        model="dense:10240:88",
        spec=load_machine("pcie6-host"),
    )


def _desktops() -> Iterator[Claim]:
    for machine in ("rtx-3080", "rtx-3090", "rtx-4090"):
        for model, gigabytes in (
            ("Qwen2.5-7B", 64),
            ("Qwen2.5-7B", 128),
            ("Qwen2.5-14B", 128),
            ("Qwen2.5-14B", 192),
        ):
            yield Claim(
                name=f"{model.removeprefix('Qwen2.5-')}, {machine} + {gigabytes} GB",
                source="readers of MegaTrain ask for desktops; 14 B on a 3090 is claimed",
                model=model,
                spec=load_machine(machine).with_ram(gigabytes * 10**9),
            )
    yield Claim(
        name="7B, rtx-4090 + 64 GB + drive",
        source="SlideFormer, arXiv 2603.16428: optimizer state on NVMe",
        model="Qwen2.5-7B",
        spec=load_machine("rtx-4090").with_ram(64 * 10**9),
        shares_drives=True,
    )


def model_config(model: str, configs: Path) -> PretrainedConfig:
    """Return a model's configuration: of a folder, or a Llama of some width and depth."""
    kind, _, shape = model.partition(":")
    if kind != "dense":
        return read_config(configs / model)
    hidden, layers = map(int, shape.split(":"))
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=-(-7 * hidden // 2 // 256) * 256,
        num_attention_heads=hidden // 128,
        num_key_value_heads=8 if hidden // 128 % 8 == 0 else hidden // 128 // 4,
        vocab_size=128256,
        tie_word_embeddings=False,
    )


_COUNTED: dict[tuple[object, ...], Anatomy] = {}


def plan(claim: Claim, configs: Path) -> tuple[Plan, Anatomy]:
    """Plan a claim."""
    key = (claim.model, claim.seq_len, claim.precision)
    if key not in _COUNTED:
        _COUNTED[key] = count_anatomy(
            model_config(claim.model, configs),
            micro_batch_size=1,
            seq_len=claim.seq_len,
            precision=claim.precision,
        )
    anatomy = _COUNTED[key]
    spec = claim.spec if claim.shares_drives else replace(claim.spec, drives=None)
    made = []
    for tokens in claim.tokens_per_step:
        count = max(1, tokens // claim.seq_len)
        request = Request(
            spec=spec,
            anatomy=anatomy,
            batch=StepBatch(micro_batch_size=1, seq_len=claim.seq_len, num_micro_batches=count),
            clips=claim.clips,
            compiles=True,
            choice=Choice() if claim.clips else Choice(updates="immediate"),
        )
        made.append(make_plan(request))
    return max(
        made, key=lambda plan: (plan.fits, plan.tokens_per_s if plan.fits else -plan.batch.tokens)
    ), anatomy


def row(claim: Claim, configs: Path) -> dict[str, Any]:
    """Return a line of the table."""
    made, anatomy = plan(claim, configs)
    money = economics(made, claim.spec, anatomy, tokens=BUDGET)
    found: dict[str, Any] = {
        "claim": claim.name,
        "source": claim.source,
        "machine": claim.spec.name,
        "num_params": anatomy.num_params,
        "clips": claim.clips,
        "precision": claim.precision,
        "seq_len": claim.seq_len,
        "tokens_per_step": made.batch.tokens,
        "fits": made.fits,
        "problem": made.problem or None,
        "host_bytes": made.tier_bytes("ram"),
        "host_limit": made.limits["ram"],
        "device_bytes": made.tier_bytes("device"),
        "device_limit": made.limits["device"],
        "drive_bytes": made.tier_bytes("nvme"),
        "host_bytes_per_param": made.tier_bytes("ram") / anatomy.num_params,
        "plan_s": made.plan_s,
    }
    if made.fits:
        choice = made.choice
        found |= {
            "step_s": made.step_s,
            "bound": made.bound,
            "tokens_per_s": made.tokens_per_s,
            "mfu": made.mfu,
            "hours_per_billion_tokens": money.days * 24,
            "usd_per_million_tokens": money.usd_per_million_tokens,
            "kwh_per_billion_tokens": money.kwh,
            "drive_days": money.drive_days,
            "lockstep": choice.lockstep,
            "resident_layers": choice.resident_layers,
            "boundaries": choice.boundaries,
            "fragments": choice.fragments,
            "gradients": choice.gradients,
            "updates": choice.updates,
        }
    return found


def rented_cluster(num_active: int) -> dict[str, Any]:
    """Return what a rented node of GPUs takes for dense training of so many active parameters."""
    per_s = CLUSTER_GPUS * CLUSTER_MFU * CLUSTER_PEAK / (6 * num_active)
    usd_per_hour = CLUSTER_GPUS * CLUSTER_USD_PER_GPU_HOUR
    return {
        "num_active_params": num_active,
        "gpus": CLUSTER_GPUS,
        "tokens_per_s": per_s,
        "usd_per_million_tokens": usd_per_hour / 3600 / per_s * 1e6,
        "assumes": f"{CLUSTER_GPUS} rented H100 at ${CLUSTER_USD_PER_GPU_HOUR} each per hour, MFU "
        f"{CLUSTER_MFU:.0%} of {CLUSTER_PEAK / 1e12:.0f} TFLOP/s, 6 FLOPs per parameter and token; sharded "
        "so that the model fits",
    }


def costs(configs: Path) -> list[dict[str, Any]]:
    """Compare one owned machine of $35,000 with a rented node, per token, for models that fit it."""
    found = []
    for model in ("Llama-3.1-8B", "Llama-3.1-70B"):
        spec = replace(load_machine("h200"), price_per_hour_usd=None, price_usd=35_000)
        made, anatomy = plan(Claim(name=model, source=DESIGN, model=model, spec=spec, seq_len=4096), configs)
        own = economics(made, spec, anatomy, tokens=BUDGET)
        rented = rented_cluster(anatomy.num_active_params)
        power = 0.15 * (own.kwh or 0.0) / (BUDGET / 1e6)
        found.append(
            {
                "model": model,
                "owned_tokens_per_s": made.tokens_per_s,
                "owned_usd_per_million_tokens": own.usd_per_million_tokens,
                "owned_power_usd_per_million_tokens": power,
                "assumes": f"{own.price_source}, always busy; $0.15 per kWh",
                "rented": rented,
            }
        )
    return found


_COLUMNS = (
    *("claim", "clipped", "parameters", "fits", "host need, of", "device need, of"),
    *("tokens per step", "tokens/s", "MFU", "bound", "$/M tokens"),
)
_HEAD = """# Published claims, planned

Arithmetic of `megatrain plan`, by `python -m benchmarks.plan.claims --configs DIR`; nothing here is measured.
Rates of machines are vendors' figures times assumed shares (`megatrain/hardware/machines`). TB are 10^12
bytes, TiB 2^40. Device memory is the whole board's; what a driver takes of it is not known here. The fastest
of 131,072, 32,768 and 8,192 tokens per step that fits, in sequences of 1,024 where the claim names no length;
bf16 compute with fp32 masters and moments where it names no precision. Not clipped: updates are immediate, so
that gradients take no plane of their own.
"""


def table(rows: list[dict[str, Any]], money: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown page."""
    lines = [_HEAD, f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for found in rows:
        speed = "| - | - | - | - | - |"
        if found["fits"]:
            usd = found["usd_per_million_tokens"]
            price = "-" if usd is None else f"{usd:.3g}"
            speed = f"| {found['tokens_per_step']:,} | {found['tokens_per_s']:,.0f} | {found['mfu']:.1%} "
            speed += f"| {found['bound']} | {price} |"
        lines.append(
            f"| {found['claim']} | {_yes(found['clips'])} | {found['num_params'] / 1e9:.1f} B "
            f"| {_yes(found['fits'])} | {_sizes(found, 'host')} | {_sizes(found, 'device')} {speed}"
        )
    lines += ["", "## Why those that do not fit do not", ""]
    lines += [
        f"- {found['claim']}{'' if found['clips'] else ', not clipped'}: {found['problem']}"
        for found in rows
        if not found["fits"]
    ]
    lines += ["", "## Sources of the claims", ""]
    lines += [f"- {source}" for source in dict.fromkeys(found["source"] for found in rows)]
    lines += ["", "## One machine of $35,000 against a rented node", ""]
    for found in money:
        rented = found["rented"]
        lines.append(
            f"- {found['model']}: owned H200 {found['owned_tokens_per_s']:,.0f} tokens/s, "
            f"${found['owned_usd_per_million_tokens']:.3g} per million tokens and "
            f"${found['owned_power_usd_per_million_tokens']:.2g} of power ({found['assumes']}); rented "
            f"{rented['tokens_per_s']:,.0f} tokens/s, ${rented['usd_per_million_tokens']:.3g} per million "
            f"({rented['assumes']})"
        )
    return "\n".join(lines) + "\n"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _sizes(found: dict[str, Any], tier: str) -> str:
    need, limit = found[f"{tier}_bytes"], found[f"{tier}_limit"]
    return f"{need / 1e9:,.0f} of {limit / 1e9:,.0f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--date", default="2026-11-21")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for claim in claims():
        rows.append(row(claim, options.configs))
        print(
            json.dumps(
                {key: rows[-1].get(key) for key in ("claim", "clips", "fits", "tokens_per_s", "plan_s")}
            )
        )
    money = costs(options.configs)
    page = table(rows, money)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.date}-claims.json").write_text(
        json.dumps({"claims": rows, "costs": money}, indent=1) + "\n"
    )
    (options.out / f"{options.date}-claims.md").write_text(page)
    print(page)
    print(json.dumps({"claims": len(rows), "fit": sum(found["fits"] for found in rows)}))


if __name__ == "__main__":
    main()
