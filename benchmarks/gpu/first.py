"""The steps of the first ten minutes on a device: what `benchmarks/gpu_first.py` runs, in its order.

The smallest thing that can go wrong comes first, so that the first failure names its own cause: packages, one
tensor, one copy, one tiny training; then how fast the machine is, and whether results are right. The steps
that train a model of real size are in `benchmarks.gpu.shape`. All of it is put together from the parts of the
suite.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.attention import attention
from benchmarks.gpu.correctness import AXES, FAMILIES_COMPARED, device_adamw, pairwise, parity
from benchmarks.gpu.races import RACES, race, syncs
from benchmarks.gpu.rates import attention_rates
from benchmarks.gpu.run import Record, best_s, device_of, synchronize
from benchmarks.report import hardware

if TYPE_CHECKING:
    from torch import Tensor

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
LONG_TOKENS = 1 << 17
"""Tokens of one long row."""


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
    """Time page-locking, which may take longer than the copies that it speeds up.

    The smallest arena is locked once more before anything has touched it, as an engine's gradients are: the
    driver clears its pages then.
    """
    from megatrain.hardware import host_memory
    from megatrain.hardware.accelerators import vendor_of
    from megatrain.store.arena import Arena

    vendor = vendor_of(device_of(is_dry))
    cases = [(number, gib, True) for number, gib in enumerate(LOCKED_GIB)]
    for number, gib, is_touched in (*cases, (0, LOCKED_GIB[0], False)):
        nbytes = 1 << (20 + number) if is_dry else gib * GIB
        row: dict[str, Any] = {"nbytes": nbytes, "is_touched": is_touched}
        free = host_memory().available_bytes
        if nbytes > free // 2:
            record.append("locks", {**row, "skipped": f"{free} bytes of host memory are free"})
            continue
        arena = Arena(nbytes)
        calls: dict[str, Callable[[], object]] = {
            "touch": arena.touch,
            "lock": partial(arena.lock, vendor),
            "unlock": arena.unlock,
        }
        for name, call in calls.items():
            if name == "touch" and not is_touched:
                continue
            began = time.perf_counter()
            found = call()
            row[f"{name}_s"] = time.perf_counter() - began
            row |= {"is_locked": found} if name == "lock" else {}
        record.append("locks", row)
        del arena
        gc.collect()
    words = [
        f"{row['nbytes'] / GIB:.3g} GiB{'' if row['is_touched'] else ' untouched'} "
        f"{'in' if row['is_locked'] else 'REFUSED after'} {row['lock_s']:.2g} s"
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
    from megatrain.hardware.this_machine import Device, describe_machine
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
    """Hold the device's update against the host's, bit for bit, and its rate against torch's fused AdamW.

    Sums of gradients are beside it: the same bytes by our kernel, where it runs, and by torch's operation.
    """
    import torch

    from megatrain.optim.adamw.fused import update_resident
    from megatrain.optim.adamw.host import AdamWStep, Planes
    from megatrain.optim.device_sums import add_all, why_not_by_kernel

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

    def seconds_of_sums(add: Callable[[list[Tensor], list[Tensor]], object]) -> float:
        sums, values = [flat()], [flat(dtype=torch.bfloat16).fill_(1e-3)]
        return best_s(device, lambda: add(sums, values), repeats=3)

    seconds, theirs = seconds_of_ours(), seconds_of_torch()
    record.add(parameters_per_s=numel / seconds, torch_parameters_per_s=numel / theirs)
    sums, of_torch = seconds_of_sums(add_all), seconds_of_sums(torch._foreach_add_)
    record.add(sums_bytes_per_s=10 * numel / sums, torch_sums_bytes_per_s=10 * numel / of_torch)
    record.add(why_not_sums=why_not_by_kernel(device.type))
    equal, kernel = len(record.values["cases"]), record.values["kernel"]
    record.add(
        gist=f"{equal} cases equal the host's bit for bit; Triton's kernel: {kernel}; "
        f"{numel / seconds / 1e9:.3g}e9 parameters/s, torch's fused AdamW {numel / theirs / 1e9:.3g}e9; "
        f"bf16 is added to fp32 {of_torch / sums:.2f} times as fast as by torch"
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


def synchronisations(record: Record, is_dry: bool) -> None:
    """List the calls of a step that make the launching thread wait for the device, but for the norm's."""
    syncs(record, is_dry)
    places = [f"{call['what']} in {call['stack'][-1]}" for call in record.values.get("calls", [])][:3]
    waits = record.values["num_launching"]
    record.add(gist=f"{waits} places wait{': ' + '; '.join(places) if waits else ' in a step'}")
    assert not waits, record.values["gist"]


def long_attention(record: Record, is_dry: bool) -> None:
    """Time the attention of one row of 128k tokens, by kernel."""
    tokens = 256 if is_dry else LONG_TOKENS
    for row in attention_rates(is_dry, tokens=tokens, lengths=(tokens,)):
        record.append("attention", row)
    words = [
        f"{row['backend']} {row['flops_per_s'] / 1e12:.3g} TFLOP/s" if "flops_per_s" in row
        else f"{row['backend']}: {row['error'][:60]}"
        for row in record.values["attention"]
    ]  # fmt: skip
    record.add(gist=f"{tokens:,} tokens: {', '.join(words)}")
