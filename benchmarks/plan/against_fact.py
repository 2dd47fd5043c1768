"""Plan against fact: memory and step time of planned runs, measured from outside the engine.

Each case is a process: it plans, obeys the plan, and takes steps. Host memory is the growth of the process's
anonymous memory (RssAnon + RssShmem) from before the state is made, less what the device's tensors hold; a
step of the same run before it has compiled kernels and made threads. Device memory is the peak of all
storages that torch makes, and of the lanes' buffers, followed operation by operation in a step of its own.
The step's time is the median of several, on lanes that take as long as the machine's rates say, with jitter.
On the CPU itself, rates are measured again before each few steps, and the median of the errors counts.

    python -m benchmarks.plan.against_fact [--only NAME] [--out FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import emit, hardware

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}
SMALL = {**LLAMA, "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 10}
LARGE = {**LLAMA, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 4096}
LONG = {
    **QWEN3_MOE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 48,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
"""Much state and little arithmetic per token, so that long sequences take seconds."""
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 320,
    "n_layer": 10,
    "n_head": 8,
    "vocab_size": 2048,
    "n_positions": 1024,
}
QWEN2 = {**SMALL, "model_type": "qwen2", "tie_word_embeddings": True}
GEMMA2 = {**SMALL, "model_type": "gemma2", "head_dim": 40, "sliding_window": 256}
PHI3 = {**SMALL, "model_type": "phi3", "pad_token_id": 0}

CASES: dict[str, dict[str, Any]] = {
    "llama 128 cpu": {"config": LARGE, "seq_len": 128, "device": "cpu"},
    "llama 256 cpu, 2 micro-batches": {"config": SMALL, "seq_len": 256, "count": 2, "device": "cpu"},
    "gpt2 256 cpu": {"config": GPT2, "seq_len": 256, "count": 2, "device": "cpu"},
    "qwen2 tied 512 cpu": {"config": QWEN2, "seq_len": 512, "device": "cpu"},
    "llama 128 emulated": {"config": SMALL, "seq_len": 128, "count": 2},
    "llama 128 emulated, half": {"config": SMALL, "seq_len": 128, "count": 2, "share": 0.5},
    "llama 128 emulated, tight": {"config": SMALL, "seq_len": 128, "count": 2, "share": 0.25},
    "llama 128, no clipping": {"config": SMALL, "seq_len": 128, "count": 2, "clips": False, "share": 0.4},
    "llama 128, state on a drive": {"config": SMALL, "seq_len": 128, "count": 2, "drive": 0.5},
    "llama 512 emulated, tight": {"config": SMALL, "seq_len": 512, "share": 0.4, "slower": 2},
    "llama bf16 64 emulated": {
        "config": {**LARGE, "num_hidden_layers": 14},
        "seq_len": 64,
        "count": 2,
        "precision": "bf16",
    },
    "qwen2 tied 256 emulated": {"config": QWEN2, "seq_len": 256, "share": 0.5},
    "gemma2 256 emulated": {"config": GEMMA2, "seq_len": 256, "share": 0.5},
    "phi3 128 emulated": {"config": PHI3, "seq_len": 128, "count": 4, "share": 0.3},
    "qwen3_moe 128 emulated": {"config": QWEN3_MOE, "seq_len": 128, "count": 2, "share": 0.5},
    "gpt2 512 emulated": {"config": GPT2, "seq_len": 512, "share": 0.5, "slower": 2},
    "qwen3_moe 2048 emulated": {"config": LONG, "seq_len": 2048, "count": 2, "share": 0.6},
    "qwen3_moe 8192 emulated": {"config": LONG, "seq_len": 8192, "share": 0.7, "slower": 2},
}
"""`share`: the device's memory, of what it takes to keep everything there. `drive`: RAM, of the state.
`slower`: by how much the emulated machine is, where softmax and dropout keep a real core busy for longer."""

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""Lets glibc give freed memory back at once, so that none is there to be used again, unseen."""

STEPS = 3
"""Measured after two that are not."""

PAIRS = 5
"""Of rates and steps, where the CPU itself computes; the median of the errors counts."""

TOKEN_SCALE = 16
"""A token of the small model stands for this many: compute is slower by it, copies of weights are not."""

REAL_FLOPS_PER_S = 1.5e10
"""What a core of this computer surely does: the emulated machine is slower."""

RATES = {"compute": 600e12, "h2d": 55e9, "d2h": 55e9, "host": 300e9, "nvme_read": 50e9, "nvme_write": 40e9}
"""Of an H100 on PCIe 5; all slowed down together until a step takes about `--seconds`."""


def main() -> None:
    """Run all cases, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cpu", "emulated"), help="only cases on this one")
    parser.add_argument("--part", default="1/1", help="2/3: the second of three parts, for runs side by side")
    parser.add_argument("--seconds", type=float, default=0.8)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(CASES[arguments.case], arguments.seconds)))
        return
    results = []
    part, num_parts = map(int, arguments.part.split("/"))
    names = [
        name
        for name, case in CASES.items()
        if arguments.device in (None, case.get("device", "emulated")) and arguments.only in (None, name)
    ]
    for name in names[part - 1 :: num_parts]:
        module = ["-m", "benchmarks.plan.against_fact"]
        command = [sys.executable, *module, "--case", name, "--seconds", str(arguments.seconds)]
        is_emulated = CASES[name].get("device") is None
        environment = {**os.environ, **(GIVES_BACK if is_emulated else {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        result = {"case": name, **json.loads(done.stdout.splitlines()[-1])}
        results.append(result)
        print(
            f"{name:<32} host {result['host_error']:+.1%}  device {result['device_error']:+.2%}  "
            f"step {result['step_error']:+.1%} ({result['step_s']:.3f} s)  {result['choice']}",
            flush=True,
        )
    emit({"benchmark": "plan_vs_fact", "hardware": hardware(), "results": results}, arguments.out)


def measure(case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Plan a case, obey the plan, and compare; an error is (plan - fact) / fact."""
    import torch
    from transformers import AutoConfig

    from benchmarks.plan.emulated_runs import Case, Run, machine_of, spec_of
    from megatrain.config.choice import StepBatch
    from megatrain.plan.search.planner import make_plan
    from megatrain.store.placement import Tiers

    torch.set_num_threads(1)
    config = AutoConfig.for_model(**case["config"])
    batch = StepBatch(micro_batch_size=1, seq_len=case["seq_len"], num_micro_batches=case.get("count", 1))
    planned = Case(
        name="",
        config=config,
        batch=batch,
        precision=case.get("precision", "fp32"),
        clips=case.get("clips", True),
    )
    is_cpu = case.get("device") == "cpu"
    machine = None
    if is_cpu:
        spec = this_cpu(planned)
    else:
        anatomy = planned.anatomy()
        flops = anatomy.model_flops_per_token * batch.tokens * 4 / 3
        seconds = max(seconds, flops / REAL_FLOPS_PER_S * case.get("slower", 1))
        factor = flops / (RATES["compute"] / TOKEN_SCALE) / seconds
        rates = {
            "compute_flops_per_s": RATES["compute"] / TOKEN_SCALE * factor,
            **{f"{name}_bytes_per_s": RATES[name] * factor for name in RATES if name != "compute"},
        }
        machine = machine_of(rates, device_bytes=None)
        spec = spec_of(machine)
        everything = make_plan(planned.request(spec)).tier_bytes("device")
        limit = int(case.get("share", 2.0) * everything)
        spec = replace(spec, device_bytes=limit)
    request = planned.request(spec)
    tiers = None
    if "drive" in case:
        assert machine is not None
        request = _with_a_drive(request, case["drive"], machine)
    plan = make_plan(request)
    assert plan.fits, plan.problem
    if "drive" in case:
        place = Path(tempfile.mkdtemp(dir="."))
        tiers = Tiers(nvme=(place,), ram=request.host_limit)
    warm_up(planned, machine, plan.choice, tiers)
    base = settled_bytes()
    run = Run(planned, machine, plan.choice, tiers=tiers)
    step_s = run.steady_s(STEPS)
    errors = [plan.step_s / step_s - 1]
    if is_cpu:
        errors = [_pair(request, planned, plan.choice, run) for _ in range(PAIRS)]
    readings = []
    for _ in range(3):  # what the emulated device has only just freed may be counted once, not always
        run.step()
        run.engine.settle()
        readings.append(settled_bytes() - base - run.engine.lanes.device_bytes)
    host = min(readings)
    device = run.device_peak()
    run.close()
    if tiers is not None:
        shutil.rmtree(tiers.nvme[0])
    planned_host, planned_device = plan.host_plane_bytes, plan.tier_bytes("device")
    if is_cpu:
        planned_device = plan.tier_bytes("ram") - planned_host
    else:
        planned_host = plan.tier_bytes("ram")  # with what waits there of activations
    kinds = {
        policy: plan.choice.activations.count(policy) for policy in dict.fromkeys(plan.choice.activations)
    }
    return {
        "host_bytes": host,
        "host_error": planned_host / host - 1,
        "device_bytes": device,
        "device_error": planned_device / device - 1,
        "step_s": step_s,
        "step_error": statistics.median(errors),
        "step_errors": errors,
        "choice": f"{kinds}, {plan.choice.num_slots} slots, {plan.choice.resident_layers} resident, "
        f"{plan.choice.lockstep} in lockstep, gradients on the {plan.choice.gradients}",
        "plan_s": plan.plan_s,
    }


def this_cpu(case: Any, measured: Any = None) -> Any:
    """Return this computer at the rates of this moment, as a run on it measures them before it plans.

    Args:
        case: Whose layers are timed.
        measured: The rest of the machine; None: as a run measures it.
    """
    import torch

    from megatrain.doctor import this_machine
    from megatrain.doctor.overhead import visit_overhead_s
    from megatrain.model.profile.timing import time_layers
    from megatrain.plan.cost.measured import Measured
    from megatrain.plan.cost.rates import Rates

    spec = replace(measured or this_machine(None), launch_s=visit_overhead_s(torch.device("cpu")))
    timed = time_layers(
        case.config,
        micro_batch_size=case.batch.micro_batch_size,
        seq_len=case.batch.seq_len,
        precision=case.precision,
    )
    return Measured.of_layers(Rates(spec, case.precision), case.anatomy(), timed).applied(spec)


def _pair(request: Any, case: Any, choice: Any, run: Any) -> float:
    """Measure the rates, then a few steps, and compare: a shared computer's speed changes by the minute."""
    from megatrain.plan.search.planner import plan_of

    planned_s = plan_of(replace(request, spec=this_cpu(case)), choice).step_s
    return planned_s / statistics.median(run.step() for _ in range(3)) - 1


def _with_a_drive(request: Any, share: float, machine: Any) -> Any:
    """Give a request less RAM than the state takes, and the machine's drive."""
    from megatrain.hardware import Drives
    from megatrain.plan.search.planner import make_plan

    whole = sum(p.nbytes for p in make_plan(request).pools if p.tier == "ram" and p.is_exact)
    rates = machine.nvme_read_bytes_per_s, machine.nvme_write_bytes_per_s
    drives = Drives(nbytes=1 << 40, read_bytes_per_s=rates[0], write_bytes_per_s=rates[1], is_duplex=True)
    spec = replace(request.spec, drives=drives)
    return replace(request, spec=spec, host_limit=int(share * whole), commit_every=1)


def warm_up(case: Any, machine: Any, choice: Any, tiers: Any) -> None:
    """Run the case itself for a step: what stays is the program's, compiled kernels, threads and the like."""
    from benchmarks.plan.emulated_runs import Run

    run = Run(case, machine, choice, tiers=tiers)
    run.step()
    run.close()


def settled_bytes() -> int:
    """Return this process's anonymous and shared memory, with freed memory given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    time.sleep(0.05)
    from megatrain.hardware import resident_bytes

    return resident_bytes()


if __name__ == "__main__":
    main()
