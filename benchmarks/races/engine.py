"""The engine itself, with real tensors, on emulated lanes: our plan, rivals' schedules, and random choices.

Every step is measured, Python and all; the lanes take as long as an emulated machine would. For each of three
machines and three models: the planner's choice, 20 random choices that fit, and strategies that others use,
each measured. The best of so many measurements is partly luck, so the planner's choice and the three best
others are then measured again, in turn; their medians count. Prints one line per case, with how far the
timetable was from what was measured, and a JSON object with everything last.

    python -m benchmarks.races.engine [--quick] [--out FILE]
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from benchmarks.plan.emulated_runs import Case, machine_of, spec_of, step_seconds
from benchmarks.report import emit, hardware
from megatrain.config.choice import Choice, StepBatch
from megatrain.plan.search.choices import list_choices
from megatrain.plan.search.planner import make_plan, plan_of
from megatrain.plan.search.request import Request, overflow

MACHINES = {
    # ratios of an H100 on PCIe 5, a 4090 on PCIe 4 and a GH200, for steps of some hundred milliseconds
    "h100-pcie5": {"compute": 600.0, "h2d": 55.0, "d2h": 55.0, "host": 300.0},
    "rtx4090-pcie4": {"compute": 150.0, "h2d": 25.0, "d2h": 25.0, "host": 70.0},
    "gh200-c2c": {"compute": 600.0, "h2d": 350.0, "d2h": 350.0, "host": 400.0},
}
"""TFLOP/s and GB/s."""

TOKEN_SCALE = 64
"""A token of the small model stands for this many: compute is slower by it, copies of weights are not."""

FINALISTS = 3
"""Rivals that are measured again."""


def models() -> dict[str, PretrainedConfig]:
    """Return the configurations."""
    return {
        "llama": LlamaConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=512,
            max_position_embeddings=512,
        ),
        "gpt2": GPT2Config(n_embd=128, n_layer=6, n_head=4, vocab_size=512, n_positions=512, use_cache=False),
        "qwen3_moe": Qwen3MoeConfig(
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=128,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=512,
            max_position_embeddings=512,
        ),
    }


def fixed_strategies(request: Request) -> dict[str, Choice]:
    """Return what others do, as far as it fits."""
    num_layers = len(request.anatomy.layers)
    count = request.batch.num_micro_batches

    def choice(policy: str, **changes: object) -> Choice:
        fields = {"num_slots": 2, "num_gradient_buffers": 2, "lockstep": count, **changes}
        return Choice(activations=(policy,) * num_layers, **fields).with_defaults(num_layers)  # type: ignore[arg-type]

    named = {
        "recompute all, layer by layer": choice("recompute"),
        "recompute all, one micro-batch at a time, updates in turn (ZeRO-3's)": choice(
            "recompute", lockstep=1, num_gradient_buffers=1, updates="serial"
        ),
        "three forwards, everything else in turn (MegaTrain's)": replace(
            choice("drop_boundary", lockstep=1, num_gradient_buffers=1, updates="serial"),
            activations=("recompute", *("drop_boundary",) * (num_layers - 1)),
        ),
        "offload all": choice("offload"),
        "keep all": choice("keep"),
        "boundaries on the host": choice("recompute", boundaries="host"),
        "half resident": choice("recompute", resident_layers=num_layers // 2, outer_resident=True),
        "serial updates": choice("recompute", updates="serial"),
    }
    return {name: c for name, c in named.items() if not overflow(request, c)}


def random_choices(request: Request, count: int, seed: int) -> list[Choice]:
    """Draw choices that fit from all that there are, each policy of each layer too."""
    chance = random.Random(seed)
    listed = list(list_choices(request))
    drawn = []
    while len(drawn) < count:
        choice = chance.choice(listed)
        if chance.random() < 0.5:
            names = ("keep", "offload", "recompute_cheap", "recompute")
            choice = replace(choice, activations=tuple(chance.choice(names) for _ in choice.activations))
        if not overflow(request, choice) and choice not in drawn:
            drawn.append(choice)
    return drawn


def race(name: str, case: Case, rates: dict[str, float], *, share: float, num_random: int) -> dict:
    """Race one case; `share` of what keeping everything takes is the device's memory."""
    free = spec_of(machine_of(rates, device_bytes=None))
    wide = make_plan(case.request(free))
    limit = int(share * wide.tier_bytes("device"))
    machine = machine_of(rates, device_bytes=limit)
    request = case.request(spec_of(machine))
    plan = make_plan(request)
    assert plan.fits, plan.problem
    measured = machine_of(rates, device_bytes=None)
    auto_s = step_seconds(case, measured, plan.choice, num_steps=2)
    rows = {"auto": (plan.step_s, auto_s)}
    drawn = random_choices(request, num_random, seed=crc32(name.encode()))
    rivals = fixed_strategies(request) | {f"random {number}": choice for number, choice in enumerate(drawn)}
    for label, choice in rivals.items():
        rows[label] = (plan_of(request, choice).step_s, step_seconds(case, measured, choice, num_steps=2))
    finalists = {"auto": plan.choice} | {
        label: rivals[label] for label in sorted(rivals, key=lambda label: rows[label][1])[:FINALISTS]
    }
    again: dict[str, list[float]] = {label: [rows[label][1]] for label in finalists}
    for _ in range(2):
        for label, choice in finalists.items():
            again[label].append(step_seconds(case, measured, choice, num_steps=2))
    rows |= {label: (rows[label][0], statistics.median(seconds)) for label, seconds in again.items()}
    auto_s, best = rows["auto"][1], min(rows[label][1] for label in finalists if label != "auto")
    errors = [abs(planned / seconds - 1) for planned, seconds in rows.values()]
    return {
        "case": name,
        "device_bytes": limit,
        "auto_over_best": best / auto_s,
        "best_rival": min((label for label in finalists if label != "auto"), key=lambda key: rows[key][1]),
        "worst_plan_error": max(errors),
        "median_plan_error": sorted(errors)[len(errors) // 2],
        "rows": {label: {"planned_s": p, "measured_s": m} for label, (p, m) in rows.items()},
    }


def main() -> None:
    """Race all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one machine, one model, three rivals")
    parser.add_argument(
        "--machine", choices=MACHINES, help="only this one: lanes sleep, so that three fit here"
    )
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a step takes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for machine_name, rates in MACHINES.items():
        if arguments.machine not in (None, machine_name):
            continue
        for model_name, config in models().items():
            case = Case(
                name=model_name,
                config=config,
                batch=StepBatch(micro_batch_size=1, seq_len=64, num_micro_batches=4),
            )
            scaled = scale(case, rates, arguments.seconds)
            name = f"{model_name} on {machine_name}"
            count = 3 if arguments.quick else arguments.random
            result = race(name, case, scaled, share=0.6, num_random=count)
            results.append(result)
            print(
                f"{name:<28} auto/best {result['auto_over_best']:.3f} (best rival: {result['best_rival']}); "
                f"plan error {result['median_plan_error']:.1%}, worst {result['worst_plan_error']:.1%}",
                flush=True,
            )
            if arguments.quick:
                break
        if arguments.quick:
            break
    emit({"benchmark": "plan_race", "hardware": hardware(), "results": results}, arguments.out)


def scale(
    case: Case, rates: dict[str, float], seconds: float, token_scale: int = TOKEN_SCALE
) -> dict[str, float]:
    """Slow a machine down until a step of recomputation takes about so many seconds of compute."""
    anatomy = case.anatomy()
    compute = rates["compute"] * 1e12 / token_scale
    flops = anatomy.model_flops_per_token * case.batch.tokens * 4 / 3
    factor = flops / compute / seconds
    return {
        "compute_flops_per_s": compute * factor,
        "h2d_bytes_per_s": rates["h2d"] * 1e9 * factor,
        "d2h_bytes_per_s": rates["d2h"] * 1e9 * factor,
        "host_bytes_per_s": rates["host"] * 1e9 * factor,
    }


if __name__ == "__main__":
    main()
