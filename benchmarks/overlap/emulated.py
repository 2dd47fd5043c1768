"""How well a step's work overlaps on emulated machines, and what rivals' schedules would take there.

    python -m benchmarks.overlap.emulated [--quick] [--machines FILE] [--out FILE]

Programs of whole training steps run on emulated lanes: real threads that sleep for as long as each operation
would take at the rates of a machine file (never edited to fit), with jitter, in a time that is stretched or
shrunk so that a run is short. Steps follow each other as in training: the updates of one run during the
forward of the next. Only waits that the buffers' names require are there. `work` has the model of
work, `ours` and `rivals` the programs, `published` the rivals' published rows.

The block is Llama-3-8B's (218M parameters); embedding and head have 525M each and are resident, with their
state where the device has room. Main rows recompute every block on all sides; rows "keep" do not recompute
as many blocks as the device has room for. The bound of a step is the largest of copies (each direction),
forward + backward, and what the optimizer cannot avoid: all of it after the last gradient and before the
last forward where clipping defers updates (backward + optimizer), itself where it is immediate.

- `step_over_bound`: the worst of h100-pcie5, deferred, at 32k tokens per step and more, all depths.
- `speedup_over_megatrain_schedule`, `speedup_over_zero3_schedule`: h100-pcie5, 32k tokens in 4 micro-batches,
  28 blocks, nothing kept but the inputs of blocks; with `_keep`, each keeps what it can in device memory.
- `optimizer_hidden`: part of our host's updates during which the device computes, in that same row.
- `depth_spread`: of step over bound from the shallowest model to the deepest, the worst over those rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.overlap import work as model
from benchmarks.overlap.claims import MAIN, SCHEDULES, Case, K, Result, check_claims, key_figures
from benchmarks.overlap.ours import Setting, our_step
from benchmarks.overlap.published import Prediction, predictions
from benchmarks.overlap.replay import JITTER_S, measure
from benchmarks.overlap.rivals import megatrain_step, zero3_step
from benchmarks.report import emit, hardware

MACHINES = Path("shared/data/emulated/machines.json")
BATCH_TOKENS = {"rtx4090-pcie4": 8 * K}
"""Tokens of a micro-batch at most where it is not 32k: what one block's activations leave room for."""


def main() -> int:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--quick", action="store_true", help="a part of the grid, under 50 s")
    parser.add_argument(
        "--machines", type=Path, help=f"machine file (default: {MACHINES} beside the checkout)"
    )
    parser.add_argument(
        "--seconds", type=float, help="wall time of one step of 28 blocks; a deeper one: 2.5x"
    )
    parser.add_argument("--only", choices=["grid", "rivals", "published"], help="run one part only")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    path = arguments.machines or find_machines()
    if path is None or not path.is_file():
        print(
            f"no machine file {path or MACHINES}: name one with --machines, or put it beside the checkout",
            file=sys.stderr,
        )
        return 2
    machines = model.load_machines(path)
    started = time.perf_counter()
    wall_s = arguments.seconds or (0.35 if arguments.quick else 0.7)
    parts = {arguments.only} if arguments.only else {"grid", "rivals", "published"}
    cases = []
    if "grid" in parts:
        cases += quick_grid(machines) if arguments.quick else full_grid(machines)
    if "rivals" in parts:
        cases += rival_cases([32 * K] if arguments.quick else [8 * K, 16 * K, 32 * K, 128 * K, 512 * K])
    wanted = [case for case in dict.fromkeys(cases) if case.machine in machines]
    results = list(run(machines, wanted, wall_s))
    rows: list[Prediction] = []
    if "published" in parts:
        rows = print_predictions(predictions(machines, quick=arguments.quick, wall_s=wall_s))
    figures = key_figures(results)
    launch = max((r.measured.launch_s / (r.measured.step_s * r.measured.pace) for r in results), default=0.0)
    print(
        f"\nlaunching thread: busy for {launch:.1%} of a step at most; it waits to be one step ahead, no more"
    )
    claims = list(check_claims(results, figures, rows))
    print_claims(claims)
    idle = {name: idle_at_bound(rates) for name, rates in machines.items()}
    print_idle(idle)
    emit(
        {
            "benchmark": "overlap",
            **figures,
            "claims": claims,
            "rows": [result.row() for result in results],
            "published": [asdict(row) | {"error": row.error} for row in rows],
            "idle_at_bound": idle,
            "assumptions": {
                "jitter_s": JITTER_S,
                "update_bytes_per_param": model.UPDATE_BYTES,
                "device_memory_bytes_per_s": model.HBM_BYTES_PER_S,
                "block_params": model.LLAMA_28.block_params,
                "part_params": model.LLAMA_28.part_params,
                "seq_len": K,
                "text": " ".join((model.__doc__ or "").split()),
            },
            "machines": {name: rates.mapping() for name, rates in machines.items()},
            "machines_file": path.name,
            "quick": arguments.quick,
            "hardware": hardware(),
            "seconds": time.perf_counter() - started,
        },
        arguments.out,
    )
    return 0


def find_machines() -> Path | None:
    """Look for the machine file beside the checkout, and beside the folders that the checkout is in."""
    checkout = Path(__file__).resolve().parents[2]
    return next((p / MACHINES for p in (checkout, *checkout.parents) if (p / MACHINES).is_file()), None)


def ours(machine: str, num_blocks: int, tokens: int, schedule: str = "deferred") -> Case:
    """Make a case of ours with as few micro-batches as the device has room for."""
    batch = BATCH_TOKENS.get(machine, 32 * K)
    return Case(
        machine=machine,
        schedule=schedule,
        num_blocks=num_blocks,
        tokens=tokens,
        num_micro_batches=max(1, tokens // batch),
    )


def quick_grid(machines: dict[str, model.Rates]) -> list[Case]:
    cases = [ours(MAIN, 28, tokens * K) for tokens in (16, 32, 128)]
    cases += [ours(MAIN, 180, 32 * K)]
    cases += [ours(MAIN, 28, tokens * K, "immediate") for tokens in (16, 32)]
    return cases + [ours(name, 28, 32 * K) for name in machines if name != MAIN]


def full_grid(machines: dict[str, model.Rates]) -> list[Case]:
    sweep = [tokens * K for tokens in (4, 8, 16, 32, 64, 128, 256, 512)]
    cases = [ours(MAIN, blocks, tokens) for blocks in (28, 180) for tokens in sweep]
    cases += [ours(MAIN, blocks, tokens * K) for blocks in (60, 100) for tokens in (32, 128)]
    cases += [ours(MAIN, 28, tokens, "immediate") for tokens in sweep]
    cases += [ours(MAIN, 180, tokens * K, "immediate") for tokens in (16, 32, 128)]
    for name in machines:
        if name != MAIN:
            cases += [ours(name, 28, tokens, schedule) for schedule in SCHEDULES for tokens in sweep]
            cases += [ours(name, 180, tokens * K) for tokens in (16, 32, 128)]
    first = ours("rtx4090-pcie4", 28, 32 * K)
    return cases + ([replace(first, head_in_turn=True)] if first.machine in machines else [])


def rival_cases(sweep: Iterable[int]) -> list[Case]:
    """Compare four micro-batches on all sides."""
    cases = []
    for tokens in sweep:
        case = replace(ours(MAIN, 28, tokens), num_micro_batches=4)
        cases += [case, replace(case, keeps=True)]
        cases += [replace(case, schedule=schedule) for schedule in ("megatrain", "zero3")]
        cases += [replace(case, schedule="zero3", keeps=True)]
    return cases


def run(machines: dict[str, model.Rates], cases: Iterable[Case], wall_s: float) -> Iterator[Result]:
    """Replay one case after the other, and print them."""
    print(
        f"{'machine':<14}{'schedule':<22}{'blocks':>6}{'tokens':>8}{'batches':>8}{'step s':>9}{'bound s':>9}"
        f"{'over':>7}{'idle':>7}{'hidden':>8}{'tok/s':>9}{'drift':>7}{'op ms':>7}  bound by"
    )
    for case in cases:
        result = run_case(machines[case.machine], case, wall_s * (1 if case.num_blocks <= 28 else 2.5))
        m = result.measured
        print(
            f"{case.machine:<14}{case.label:<22}{case.num_blocks:>6}{case.tokens // K:>7}k"
            f"{case.num_micro_batches:>8}{m.step_s:>9.3f}{m.bound_s:>9.3f}{m.over_bound:>7.3f}"
            f"{m.device_idle:>7.1%}{m.optimizer_hidden:>8.1%}{case.tokens / m.step_s:>9.0f}"
            f"{m.drift:>7.1%}{1e3 * m.median_task_s:>7.1f}  {m.bound_by}",
            flush=True,
        )
        yield result


def run_case(rates: model.Rates, case: Case, wall_s: float) -> Result:
    shape = replace(model.LLAMA_28, num_blocks=case.num_blocks)
    costs = model.Costs(shape=shape, rates=rates)
    if case.is_ours:
        setting = Setting(
            tokens=case.tokens,
            num_micro_batches=case.num_micro_batches,
            is_immediate=case.schedule == "immediate",
            keeps=case.keeps,
            head_in_turn=case.head_in_turn,
        )
        step = our_step(costs, setting)
    elif case.schedule == "megatrain":
        step = megatrain_step(costs, tokens=case.tokens, num_micro_batches=case.num_micro_batches)
    else:
        batches = case.num_micro_batches
        step = zero3_step(costs, tokens=case.tokens, num_micro_batches=batches, keeps=case.keeps)
    return Result(case=case, measured=measure(step, wall_s=wall_s), details=step.details, costs=costs)


def idle_at_bound(rates: model.Rates) -> dict[str, dict[int, float]]:
    """Return how long the device must idle whatever the order, as a part of the step, by schedule and tokens.

    Arithmetic, for 28 blocks; up to the first number of tokens at which it need not idle at all.
    """
    idle: dict[str, dict[int, float]] = {}
    costs = model.Costs(shape=model.LLAMA_28, rates=rates)
    for schedule in SCHEDULES:
        idle[schedule] = {}
        for tokens in range(2 * K, 130 * K, 2 * K):
            case = ours(rates.name, 28, tokens, schedule)
            batches, is_immediate = case.num_micro_batches, schedule == "immediate"
            setting = Setting(tokens=tokens, num_micro_batches=batches, is_immediate=is_immediate)
            limits = our_step(costs, setting).limits()
            idle[schedule][tokens] = 1 - limits["forward + backward"] / max(limits.values())
            if not idle[schedule][tokens]:
                break
    return idle


def print_predictions(rows: Iterator[Prediction]) -> list[Prediction]:
    done = []
    print(f"\n{'published row':<66}{'fitted TF':>10}{'published':>11}{'predicted':>11}{'error':>8}")
    for row in rows:
        done.append(row)
        name = f"{row.system}: {row.model}, seq {row.seq_len}, {row.tokens // K}k/step"
        print(
            f"{name:<66}{row.fitted_flops_per_s / 1e12:>10.0f}{row.published:>11.0f}{row.predicted:>11.0f}"
            f"{row.error:>+8.1%}{'  ' + row.why if row.why else ''}",
            flush=True,
        )
    return done


def print_claims(claims: list[dict[str, Any]]) -> None:
    print()
    for claim in claims:
        verdict = "met    " if claim["met"] else "NOT MET"
        why = f": {claim['why']}" if claim["why"] else ""
        print(f"{verdict} {claim['claim']}: {claim['measured']:.3f} (limit {claim['limit']:g}){why}")


def print_idle(idle: dict[str, dict[str, dict[int, float]]]) -> None:
    """Say where the device must idle, whatever the order."""
    print("\ndevice idle at the bound, by tokens per step:")
    for name, schedules in idle.items():
        for schedule, parts in schedules.items():
            some = [f"{t // K}k {part:.0%}" for t, part in parts.items() if part and t // K in (4, 8, 16, 24)]
            print(f"{name}, {schedule}: {', '.join([*some, f'0% from {max(parts) // K}k'])}")
    print()


if __name__ == "__main__":
    sys.exit(main())
