"""The steps of the first ten minutes on a device: what `benchmarks/gpu_first.py` runs, in its order.

The smallest thing that can go wrong comes first, so that the first failure names its own cause: packages, one
tensor, one copy, one tiny training; then how fast the machine is, whether results are right, and one shape of
real size with its plan held against what it took. All of it is put together from the parts of the suite.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.attention import attention
from benchmarks.gpu.cells import STREAMED, at_the_end, raise_noted
from benchmarks.gpu.correctness import AXES, FAMILIES_COMPARED, device_adamw, pairwise, parity
from benchmarks.gpu.engine import Session, ours
from benchmarks.gpu.measure import Work, config_of
from benchmarks.gpu.races import RACES, race
from benchmarks.gpu.run import Record, best_s, compile_cheaply, device_of, synchronize
from benchmarks.report import hardware

REQUIRED = ("torch", "transformers", "numba", "llvmlite", "numpy", "safetensors", "tokenizers", "greenlet",
            "xxhash")  # fmt: skip
"""Without one of these no engine runs."""
OPTIONAL = {
    "triton": "compiled layers, the fused AdamW",
    "pydantic": "the command line, settings",
    "typer": "the command line",
    "rich": "the command line",
    "datasets": "parquet files",
    "pyarrow": "parquet files",
    "liger_kernel": "model.kernels=liger",
    "pynvml": "power and heat",
    "peft": "adapters",
}
"""What for."""
GIB = 1 << 30
LOCKED_GIB = (1, 16, 32)
DEPTHS = (32, 24, 16, 8)
"""Layers of the 8B shape, until one fits into the host's memory."""
LONGEST_SHOWN = 12
"""Kernels of a traced step."""


# -- packages ----------------------------------------------------------------------------------------------


def imports(record: Record, is_dry: bool) -> None:
    """Import every package, and say of those that are missing what goes without them."""
    missing = []
    for name in (*REQUIRED, *OPTIONAL):
        began = time.perf_counter()
        row: dict[str, Any] = {"package": name}
        try:
            module = importlib.import_module(name)
            row["version"] = getattr(module, "__version__", None)
        except Exception as error:  # a package that is there may fail in its own way
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            row["lost"] = OPTIONAL.get(name, "everything")
            missing += [name] if name in REQUIRED else []
        record.append("packages", {**row, "seconds": round(time.perf_counter() - began, 2)})
    record.add(python=platform.python_version())
    if missing:
        raise RuntimeError(f"nothing runs without {', '.join(missing)}")
    from megatrain.hardware.accelerators import missing_compiler

    importlib.import_module("megatrain.stream.engine")
    record.add(hardware=hardware(), missing_compiler=missing_compiler())
    lost = [f"{row['package']} ({row['lost']})" for row in record.values["packages"] if "error" in row]
    lost += [f"{lacks} (compiled layers)"] if (lacks := missing_compiler()) else []
    record.add(gist=f"missing: {', '.join(lost)}" if lost else "every package is there")


# -- one tensor, one copy, one training --------------------------------------------------------------------


def smoke(record: Record, is_dry: bool) -> None:
    """Do everything once, at the smallest size; `stage` says how far it came."""
    import torch

    from megatrain.hardware.accelerators import device_name, free_bytes, vendor_of
    from megatrain.store.arena import Arena

    record.add(stage="the device")
    device = device_of(is_dry)
    record.add(device=str(device), device_name=device_name(device), free_bytes=free_bytes(device))
    assert (torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum().item() == 512
    record.add(stage="a stream and an event")
    stream = torch.Stream(device=device)
    with stream:
        there = torch.arange(1 << 16, device=device)
        event = torch.Event(device=device)
        event.record(stream)
    event.synchronize()
    record.add(stage="page-locking 4 MiB")
    arena = Arena(4 << 20)
    is_locked = arena.lock(vendor_of(device))
    record.add(stage="a copy each way", is_locked=is_locked)
    host = arena.view(torch.int64, 0, 1 << 16)
    host.copy_(there, non_blocking=True)
    synchronize(device)
    assert torch.equal(host, torch.arange(1 << 16))
    there.copy_(host.add_(1), non_blocking=True)
    synchronize(device)
    assert there[-1].item() == 1 << 16
    arena.unlock()
    record.add(stage="importing the engine")
    from tests.families import FAMILIES
    from tests.reference import attach_plainly, make_batches, make_model

    for settings in (
        {"activations": "recompute"},
        {"activations": "offload", "boundaries": "host", "lockstep": 2, "num_micro_batches": 2},
        {"activations": "keep", "resident_layers": 2},
    ):
        record.add(stage=f"training, {settings}")
        model = make_model(FAMILIES["llama_tied"](), dtype=torch.bfloat16)
        engine = attach_plainly(model, device=str(device), precision="bf16", compile="off", **settings)
        optimizer = engine.adamw(lr=1e-3, max_grad_norm=1.0)
        losses = []
        for _ in range(3):
            losses.append(engine.forward_backward(make_batches(2)).item())
            assert optimizer.step().grad_norm > 0
        engine.detach()
        engine.lanes.close()
        record.append("trained", {**settings, "losses": losses})
        assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    record.add(stage="done", gist=f"{device_name(device)}, {record.values['free_bytes'] / 1e9:.1f} GB free")


# -- how fast the machine is -------------------------------------------------------------------------------


def locking(record: Record, is_dry: bool) -> None:
    """Time page-locking, which may take longer than the copies that it speeds up."""
    from megatrain.hardware import host_memory
    from megatrain.hardware.accelerators import vendor_of
    from megatrain.store.arena import Arena

    vendor = vendor_of(device_of(is_dry))
    for number, gib in enumerate(LOCKED_GIB):
        nbytes = 1 << (20 + number) if is_dry else gib * GIB
        free = host_memory().available_bytes
        if nbytes > free // 2:
            record.append("locks", {"nbytes": nbytes, "skipped": f"{free} bytes of host memory are free"})
            continue
        arena = Arena(nbytes)
        seconds = {}
        calls: dict[str, Callable[[], object]] = {
            "touch": arena.touch,
            "lock": partial(arena.lock, vendor),
            "unlock": arena.unlock,
        }
        for name, call in calls.items():
            began = time.perf_counter()
            is_done = call()
            seconds[f"{name}_s"] = time.perf_counter() - began
            if name == "lock":
                is_locked = is_done
        record.append("locks", {"nbytes": nbytes, "is_locked": is_locked, **seconds})
        del arena
        gc.collect()
    words = [
        f"{row['nbytes'] / GIB:.3g} GiB {'in' if row['is_locked'] else 'REFUSED after'} {row['lock_s']:.2g} s"
        for row in record.values["locks"]
        if "lock_s" in row
    ]
    record.add(gist=f"locked {', '.join(words)}")


def rates(record: Record, is_dry: bool) -> None:
    """Measure this machine as `megatrain doctor --bench` does, without its drive."""
    from megatrain.doctor.bench import Sizes, run_bench
    from megatrain.doctor.examine import bench_json
    from megatrain.hardware.accelerators import device_name, free_bytes
    from megatrain.hardware.machines import machine_json
    from megatrain.hardware.present import Device, describe_machine
    from megatrain.optim.adamw.fused import fuses_updates
    from megatrain.optim.threads import worker_threads

    sizes = Sizes(seconds=0.3, lock_bytes=0, compresses=False)
    if is_dry:
        sizes = dataclasses.replace(
            sizes, seconds=0.0, copy_bytes=1 << 20, node_bytes=1 << 20, update_numel=1 << 16,
            attention_tokens=128, overhead_layers=3,
        )  # fmt: skip
    device = device_of(is_dry)
    present = Device(name=device_name(device), nbytes=free_bytes(device), fuses_updates=fuses_updates(device))
    bench = run_bench(device, None, sizes, show=lambda what: record.add(stage=what))
    copies, rates = bench.copies, bench.rates
    products, attention = rates.matmul_flops_per_s["bf16"], rates.attention_flops_per_s["bf16"]
    machine = describe_machine(rates, device=present, num_cores=worker_threads(), path=None)
    record.add(
        stage="done",
        bench=bench_json(bench),
        machine=machine_json(machine),
        matmul_flops=products,
        gist=f"bf16 {products / 1e12:.3g} TFLOP/s, attention {attention / 1e12:.3g}; "
        f"copies {copies.h2d_locked / 1e9:.3g} GB/s to the device, {copies.d2h_locked / 1e9:.3g} back, "
        f"{copies.both / 1e9:.3g} both at once",
    )


def adamw(record: Record, is_dry: bool) -> None:
    """Hold the device's update against the host's, bit for bit, and its rate against torch's fused AdamW."""
    import torch

    from megatrain.optim.adamw.fused import update_resident
    from megatrain.optim.adamw.host import AdamWStep, Planes

    device = device_of(is_dry)
    numel = 1 << 16 if is_dry else 1 << 28
    flat = partial(torch.zeros, numel, device=device)

    def seconds_of_ours() -> float:
        planes = Planes(
            working=flat(dtype=torch.bfloat16),
            remainder=flat(dtype=torch.int16),
            exp_avg=flat(),
            exp_avg_sq=flat(),
            gradient=flat(dtype=torch.bfloat16).fill_(1e-3),
        )
        hyper = AdamWStep(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
        return best_s(device, lambda: update_resident(device, [(hyper, planes)]), repeats=3)

    def seconds_of_torch() -> float:
        weight = torch.nn.Parameter(flat())
        weight.grad = flat().fill_(1e-3)
        return best_s(device, torch.optim.AdamW([weight], lr=1e-4, fused=True).step, repeats=3)

    device_adamw(record, is_dry)
    seconds, theirs = seconds_of_ours(), seconds_of_torch()
    record.add(parameters_per_s=numel / seconds, torch_parameters_per_s=numel / theirs)
    equal, kernel = len(record.values["cases"]), record.values["kernel"]
    record.add(
        gist=f"{equal} cases equal the host's bit for bit; Triton's kernel: {kernel}; "
        f"{numel / seconds / 1e9:.3g}e9 parameters/s, torch's fused AdamW {numel / theirs / 1e9:.3g}e9"
    )


# -- whether results are right -----------------------------------------------------------------------------


def parity_rows(record: Record, is_dry: bool) -> None:
    """Hold streamed against resident training on this device: eight settings, every kind of activations."""
    parity(record, is_dry, first_cases())
    num_bitwise, num_cases = record.values["num_bitwise"], record.values["num_cases"]
    record.add(gist=f"{num_bitwise} of {num_cases} cases equal resident training bit for bit")


def first_cases() -> Iterator[dict[str, Any]]:
    """Yield the plainest case in both precisions, and one for each kind of activation."""
    plain = {axis: values[0] for axis, values in AXES.items()}
    for precision in ("fp32", "bf16"):
        yield {"family": FAMILIES_COMPARED[0], "precision": precision, **plain}
    rows = pairwise(AXES)
    for number, activations in enumerate(AXES["activations"]):
        row = next(row for row in rows[number:] if row["activations"] == activations)
        family = FAMILIES_COMPARED[number % len(FAMILIES_COMPARED)]
        yield {"family": family, "precision": ("bf16", "fp32")[number % 2], **row}


def two_races(record: Record, is_dry: bool) -> None:
    """Look for races where activations leave the device, and where layers are streamed in parts."""
    race(record, is_dry, RACES[2:4], ["slow_both"], steps=3)
    record.add(gist=f"{len(record.values['runs'])} delayed runs equal those that wait, bit for bit")


def default_attention(record: Record, is_dry: bool) -> None:
    """Hold the attention that a run takes against itself and the resident model, with its own kernels."""
    attention(record, is_dry)
    words = [
        f"{row['kernel']} at {row['seq_len']}{' deterministic' if row['is_deterministic'] else ''}: "
        f"{'the same' if row['is_repeated'] else 'NOT the same'} twice"
        for row in record.values["cases"]
    ]
    record.add(gist="; ".join(words))


# -- one shape of real size --------------------------------------------------------------------------------


def cell_shape(record: Record, session: Session) -> None:
    """8B, sequences of 1k, 32k tokens a step, four steps: layers not compiled and compiled, as planned."""
    work = Work(seq_len=1024, rows=32)
    if session.is_dry:
        compile_cheaply()
    until, words = session.until, []
    for compiles, left in (("off", 2), ("on", 1)):
        session.until = time.monotonic() + (until - time.monotonic()) / left
        with at_the_end(record, f"compile {compiles}"):
            depth, plan = planned(session, work.sized(session.is_dry), compiles == "on")
            attempts = [{"choice": plan.choice, "compile": compiles}, {**STREAMED, "compile": compiles}]
            row = ours(
                record, session, "8b", work, attempts, num_layers=depth,
                label=f"compile {compiles}",
                measuring=session.measuring(steps=4, warm_up=1),
                look=partial(look, session, work, f"trace-compile-{compiles}"),
            )  # fmt: skip
            facts = {
                "compile": compiles,
                **against_fact(plan, row),
                "is_the_planned": "choice" in row["asked"],
            }
            record.append("plan_against_fact", facts)
            assert compiles == "off" or row["num_graphs"], "no layer was compiled; the log says why"
            seconds, peak = (facts[name]["off_by"] for name in ("step_s", "device_bytes"))
            rate = f"{row['tokens_per_s']:,.0f} tokens/s, {row['of_matmul_peak']:.0%} of products alone"
            words.append(f"compile {compiles}: {rate}; plan: time {seconds:+.0%}, device memory {peak:+.0%}")
            record.add(gist="; ".join(words))
    raise_noted(record)


def planned(session: Session, work: Work, compiles: bool) -> tuple[int, Any]:
    """Return how many layers fit into this machine, and their plan.

    Raises:
        CapacityError: Not even the fewest fit.
    """
    from megatrain.config.choice import StepBatch
    from megatrain.errors import CapacityError
    from megatrain.model.profile.count import count_anatomy
    from megatrain.plan.search.planner import make_plan
    from megatrain.plan.search.request import Request

    spec = machine(session)
    batch = StepBatch(micro_batch_size=work.rows, seq_len=work.seq_len, num_micro_batches=1)
    for depth in DEPTHS:
        config = config_of("8b", session.is_dry, depth)
        anatomy = count_anatomy(config, micro_batch_size=work.rows, seq_len=work.seq_len, precision="bf16")
        plan = make_plan(Request(spec=spec, anatomy=anatomy, batch=batch, compiles=compiles))
        if plan.fits:
            return depth, plan
    raise CapacityError(plan.problem)


def machine(session: Session) -> Any:
    """Return the machine that the step `rates` has measured in this directory, or measure it."""
    from megatrain.hardware import load_machine

    path = session.out / "rates.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if "machine" not in found:
        record = Record(session.out / "rates-again.json")
        rates(record, session.is_dry)
        found = record.values
    kept = session.out / "machine.json"
    kept.write_text(json.dumps(found["machine"]))
    return load_machine(kept)


def look(session: Session, work: Work, name: str, engine: Any) -> dict[str, Any]:
    """Train one step more under torch's profiler, whose trace is kept, and say what it took longest for."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    batches = work.sized(session.is_dry).micro_batches(engine.model.config.vocab_size)
    activities = supported_activities() & {getattr(ProfilerActivity, kind) for kind in ("CPU", "CUDA", "XPU")}
    with profile(activities=activities) as found:
        engine.forward_backward(batches)
        engine.optimizer.step()
        synchronize(session.device)
    trace = session.out / f"{name}.json.gz"
    found.export_chrome_trace(str(trace))
    events = found.key_averages()
    kind = "device" if any(event.self_device_time_total for event in events) else "cpu"
    own = [(event.key, getattr(event, f"self_{kind}_time_total"), event.count) for event in events]
    longest = sorted(own, key=lambda row: -row[1])[:LONGEST_SHOWN]
    return {
        "trace": trace.name,
        "num_graphs": 0 if engine.compiler is None else engine.compiler.num_graphs,
        "longest": [{"kernel": key[:80], "ms": us / 1e3, "count": count} for key, us, count in longest],
        "device_pool_bytes": engine.lanes.device_bytes,
        "host_plane_bytes": sum(engine.host.plane_bytes.values()),
    }


def against_fact(plan: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Hold what was planned against what was measured."""
    pairs = {
        "step_s": (plan.step_s, row["step_s"]["median"]),
        "device_pool_bytes": (plan.device_pool_bytes, row["device_pool_bytes"]),
        "device_bytes": (plan.tier_bytes("device"), row["device_bytes_peak"]),
        "host_plane_bytes": (plan.host_plane_bytes, row["host_plane_bytes"]),
    }
    return {
        "bound": plan.bound,
        "choice": plan.choice.describe(),
        **{
            name: {"planned": one, "measured": other, "off_by": one / other - 1 if other else None}
            for name, (one, other) in pairs.items()
        },
    }
