"""Parity, race stress and speed on one CUDA device, in one command.

    python benchmarks/gpu_suite.py --out DIR [--steps environment,rates,...] [--seconds N] [--dry-run]

Steps run in the order given, each in a process of its own with a time limit of its own; a step that fails
or runs out of time does not stop the next one. Every step writes `DIR/<step>.json` as it goes, so that a
step that was stopped leaves what it had found; `DIR/suite.json` has them all, and so has the last line of
stdout.

- `environment`: versions, device, memory.
- `rates`: copy rates each way between page-locked, locked-in-place and ordinary host memory and the device,
  and the matmul peak in bf16.
- `parity`: streamed against resident training on the same device, tiny models, three steps. fp32 with
  deterministic algorithms and without TF32 should be equal bit for bit (`is_bitwise`): same kernels, same
  order. It fails above `TOLERANCES`, relative to the largest gradient of a parameter: a library may choose
  another algorithm for memory of another alignment, and Adam's first steps turn a last bit of a small
  gradient into a whole step.
- `races`: blocks with tiny and huge weights in turn, with and without random delays in the compute stream
  and in the copy streams; every run equals a run that waits for the device after every copy, bit for bit.
- `speed_1b`, `speed_8b`: tokens/s with random bf16 weights, sequences of 1024 tokens, everything
  recomputed. Model FLOPs are 6 x (parameters without the embedding, with the head) per token plus causal
  attention at half; what is recomputed does not count. The loss must fall and the gradient norm be above
  zero.

`--dry-run` runs all of it on the CPU with tiny shapes, to test the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' reference and families, from a checkout without an installation

LIMITS = {
    "environment": 45.0,
    "rates": 60.0,
    "parity": 150.0,
    "races": 90.0,
    "speed_1b": 90.0,
    "speed_8b": 300.0,
}
"""Seconds for each step, in the default order."""
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest difference in the first step: of a loss, and of a gradient, relative to its parameter's largest."""
LATER_TOLERANCES = {"fp32": 1e-2, "bf16": 2e-1}
"""The same in later steps: Adam turns the last bit of a gradient near zero into a whole step of a weight."""
NOMINAL_BF16_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 peaks that vendors state, FLOP/s, by a part of the device's name."""
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Record:
    """The result of one step, on disk after every change."""

    def __init__(self, path: Path) -> None:
        """Begin an empty result."""
        self.path = path
        self.values: dict[str, Any] = {"status": "running"}

    def add(self, **values: Any) -> None:
        """Add values, and write everything."""
        self.values.update(values)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values, indent=1) + "\n")
        part.replace(self.path)

    def append(self, key: str, row: dict[str, Any]) -> None:
        """Add a row to a list, write everything, and show the row."""
        print(json.dumps({key: row}), flush=True)
        self.add(**{key: [*self.values.get(key, []), row]})


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON files")
    parser.add_argument("--steps", default=",".join(LIMITS), help="which steps, in which order")
    parser.add_argument("--seconds", type=float, default=585.0, help="time for all steps (default: 585)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--one", choices=list(LIMITS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        sys.exit(run_here(arguments.one, arguments.out, is_dry=arguments.dry_run))
    steps = arguments.steps.split(",")
    unknown = sorted(set(steps) - set(LIMITS))
    if unknown:
        parser.error(f"unknown steps: {', '.join(unknown)}; there are {', '.join(LIMITS)}")
    results = run_all(steps, arguments.out, arguments.seconds, is_dry=arguments.dry_run)
    print(json.dumps({"benchmark": "gpu_suite", "dry_run": arguments.dry_run, **results}), flush=True)
    sys.exit(any(result["status"] != "ok" for result in results.values()))


def run_all(steps: list[str], out: Path, seconds: float, *, is_dry: bool) -> dict[str, dict[str, Any]]:
    """Run steps in processes of their own, and return what each of them wrote."""
    stop = time.monotonic() + seconds
    results: dict[str, dict[str, Any]] = {}
    for step in steps:
        path = out / f"{step}.json"
        path.unlink(missing_ok=True)
        limit = min(LIMITS[step], stop - time.monotonic())
        status = "skipped: no time left" if limit < 5 else run_apart(step, out, limit, is_dry=is_dry)
        result = json.loads(path.read_text()) if path.exists() else {}
        results[step] = {**result, "status": status}
        print(f"== {step}: {status}", flush=True)
        (out / "suite.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def run_apart(step: str, out: Path, limit: float, *, is_dry: bool) -> str:
    """Run one step in a process of its own, and say how it ended."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", step, "--out", str(out)]
    # cuBLAS is deterministic only with a workspace of this form; it is read when the library starts.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false"}
    started = time.monotonic()
    try:
        code = subprocess.run(
            [*command, *(["--dry-run"] if is_dry else [])], timeout=limit, env=environment, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    return "ok" if code == 0 else f"failed with {code} after {time.monotonic() - started:.0f} s"


def run_here(step: str, out: Path, *, is_dry: bool) -> int:
    """Run one step in this process; returns the exit code."""
    run: dict[str, Callable[[Record, bool], None]] = {
        "environment": environment,
        "rates": rates,
        "parity": parity,
        "races": races,
        "speed_1b": lambda record, is_dry: speed(record, is_dry, shape_of("1b", is_dry)),
        "speed_8b": lambda record, is_dry: speed(record, is_dry, shape_of("8b", is_dry)),
    }
    if is_dry:
        import torch

        torch.set_num_threads(1)  # tiny shapes on a busy machine: threads would only wait for each other
    record = Record(out / f"{step}.json")
    started = time.monotonic()
    try:
        run[step](record, is_dry)
    except BaseException as error:
        traceback.print_exc()
        record.add(status="failed", error=f"{type(error).__name__}: {error}"[:2000])
        return 1
    record.add(status="ok", seconds=time.monotonic() - started)
    return 0


# -- environment and rates ---------------------------------------------------------------------------------


def environment(record: Record, is_dry: bool) -> None:
    """Record the machine, and that the device computes at all."""
    import torch
    from report import hardware

    record.add(hardware=hardware(), cuda=torch.version.cuda, threads=torch.get_num_threads())
    device = device_of(is_dry)
    assert (torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum().item() == 512
    if not is_dry:
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        record.add(
            free_bytes=free,
            total_bytes=total,
            capability=[properties.major, properties.minor],
            num_copy_engines=getattr(properties, "async_engine_count", None),
        )


def rates(record: Record, is_dry: bool) -> None:
    """Measure copies each way, from each kind of host memory, and the matmul peak."""
    import torch

    from megatrain.store.arena import Arena

    device = device_of(is_dry)
    nbytes = 1 << 22 if is_dry else 1 << 30
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    arena = Arena(nbytes)
    plain, locked = torch.ones(nbytes, dtype=torch.uint8), arena.view(torch.uint8, 0, nbytes).fill_(1)
    kinds = {"pageable": plain}
    if not is_dry:
        record.add(arena_locks=arena.lock())
        kinds |= {"locked_arena": locked, "torch_pinned": torch.ones(nbytes, dtype=torch.uint8).pin_memory()}
    found = {}
    for kind, host in kinds.items():
        found[f"h2d_{kind}"] = nbytes / best_s(device, lambda: on_device.copy_(host, non_blocking=True))  # noqa: B023
        found[f"d2h_{kind}"] = nbytes / best_s(device, lambda: host.copy_(on_device, non_blocking=True))  # noqa: B023
    record.add(copy_bytes_per_s=found)
    if not is_dry:
        record.add(both_ways=both_ways(on_device, locked, kinds["torch_pinned"]))
        arena.unlock()
    size = 256 if is_dry else 8192
    dtype = torch.float32 if is_dry else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    record.add(matmul_flops=2 * size**3 / best_s(device, lambda: left @ right, repeats=20))
    if not is_dry:  # last: a refusal may leave the device unusable for this process
        record.add(copy_across_locked_pieces=copy_across_pieces())


def both_ways(on_device: Any, source: Any, target: Any) -> dict[str, float]:
    """Measure a copy to the device and one from it at the same time, in bytes/s of both together."""
    import torch

    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    other = torch.zeros_like(on_device)

    def both() -> None:
        with torch.cuda.stream(up):
            on_device.copy_(source, non_blocking=True)
        with torch.cuda.stream(down):
            target.copy_(other, non_blocking=True)

    torch.cuda.synchronize()
    return {"bytes_per_s": 2 * on_device.numel() / best_s(on_device.device, both)}


def copy_across_pieces() -> str:
    """Say whether one copy may cross the border of two ranges that were locked one after the other."""
    import torch

    from megatrain.store.arena import Arena

    piece, cudart = 64 << 20, torch.cuda.cudart()
    arena = Arena(2 * piece)
    flat = arena.view(torch.uint8, 0, arena.nbytes)
    flat.copy_(torch.arange(arena.nbytes, dtype=torch.int64).to(torch.uint8))
    addresses = [flat.data_ptr(), flat.data_ptr() + piece]
    codes = [int(cudart.cudaHostRegister(address, piece, 0)) for address in addresses]
    if any(codes):
        return f"the driver refuses to lock: {codes}"
    part = flat[piece - 4096 : piece + 4096]
    try:
        back = part.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        return "equal" if torch.equal(back.cpu(), part) else "WRONG BYTES"
    except RuntimeError as error:
        return f"refused: {error}"[:300]
    finally:
        for address in addresses:
            cudart.cudaHostUnregister(address)


def best_s(device: Any, run: Callable[[], object], repeats: int = 5) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


# -- parity ------------------------------------------------------------------------------------------------


def parity(record: Record, is_dry: bool) -> None:
    """Train tiny models streamed and resident, and compare losses, gradients, norms and masters."""
    be_deterministic()
    failures = []
    for case in parity_cases(is_dry):
        try:
            row = {**case, **compare(device_of(is_dry), **case)}
        except Exception as error:  # one family's failure must not hide what the others show
            row = {**case, "is_ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        record.append("cases", row)
        if not row["is_ok"]:
            failures.append(row)
    cases = record.values["cases"]
    record.add(
        num_cases=len(cases),
        num_bitwise=sum(case.get("is_bitwise", False) for case in cases),
        tolerances={"first_step": TOLERANCES, "later_steps": LATER_TOLERANCES},
    )
    assert not failures, f"{len(failures)} of {len(cases)} cases differ, the first: {failures[0]}"


def parity_cases(is_dry: bool) -> Iterator[dict[str, Any]]:
    """Yield what to compare: one family after the other, the simplest first."""
    families = ["llama_tied", "gemma2", "mixtral", "gpt2"]
    for family in families[:2] if is_dry else families:
        for precision in ("fp32", "bf16"):
            for activations in ("recompute", "keep"):
                for num_slots in (2,) if is_dry else (2, 1, 3):
                    yield {
                        "family": family,
                        "precision": precision,
                        "activations": activations,
                        "num_slots": num_slots,
                        "num_micro_batches": 2 if num_slots == 2 else 1,
                        "dropout": family == "gpt2" and num_slots == 1,
                    }


def compare(
    device: Any,
    *,
    family: str,
    precision: str,
    activations: str,
    num_slots: int,
    num_micro_batches: int,
    dropout: bool,
    steps: int = 3,
) -> dict[str, Any]:
    """Train streamed and resident for some steps; returns the largest differences of each."""
    import torch

    import megatrain
    from tests.families import FAMILIES
    from tests.reference import Resident, make_batches, make_model

    config = FAMILIES[family]()
    config._experts_implementation = "eager"  # the grouped kernel of newer GPUs has no fp32 form
    if dropout:
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.1
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = make_model(config, dtype=dtype)
    reference = Resident(model, **HYPER)
    held = {name: id(parameter) for name, parameter in reference.parameters.items()}
    reference.model.to(device)
    assert held == {n: id(p) for n, p in reference.model.named_parameters() if p.requires_grad}
    engine = megatrain.attach(
        model, device=device, precision=precision, num_slots=num_slots, activations=activations
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    differences: list[dict[str, float]] = []
    for step in range(steps):
        worst = {"gradient": 0.0, "master": 0.0}
        batches = make_batches(num_micro_batches, seed=step, rows=2, tokens=32, padded=step == 1)
        seeds = [100 * step + number for number in range(num_micro_batches)]
        there = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
        expected = reference.forward_backward(there, seeds).cpu()
        loss = engine.forward_backward(batches, seeds=seeds).cpu()
        worst["loss"] = difference(loss, expected)
        gradients = dict(engine.named_gradients())
        assert gradients.keys() == reference.sums.keys()
        for name, gradient in gradients.items():
            worst["gradient"] = max(worst["gradient"], difference(gradient, reference.sums[name].cpu()))
        stats = optimizer.step()
        worst["norm"] = abs(stats.grad_norm / reference.norm() - 1)
        reference.step(stats.grad_norm, 0.5)
        for name, master in engine.named_masters():
            worst["master"] = max(worst["master"], difference(master, reference.master(name)))
        differences.append(worst)
    engine.detach()
    allowed = [TOLERANCES[precision]] + [LATER_TOLERANCES[precision]] * (steps - 1)
    is_ok = all(
        max(worst["loss"], worst["gradient"]) <= limit and worst["norm"] <= max(1e-5, worst["gradient"])
        for worst, limit in zip(differences, allowed, strict=True)
    )
    is_bitwise = all(worst[key] == 0.0 for worst in differences for key in ("loss", "gradient", "master"))
    return {"is_ok": is_ok, "is_bitwise": is_bitwise, "differences": differences}


def difference(actual: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest expected value; 0 means equal."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().item() or 1.0
    value = (actual.float() - expected.float()).abs().max().item() / scale
    return value if value == value else float("inf")


# -- races -------------------------------------------------------------------------------------------------


def races(record: Record, is_dry: bool) -> None:
    """Compare runs with every kind of delay, bit for bit, with one that waits after every copy."""
    be_deterministic()
    steps = 3 if is_dry else 12
    variants = ["plain", "slow_compute", "slow_copies", "slow_both"]
    failures = []
    settings = [("recompute", 2, 1), ("keep", 2, 2), ("recompute", 1, 1), ("keep", 3, 1)]
    for policy, num_slots, num_buffers in settings[:2] if is_dry else settings:
        options = {"activations": policy, "num_slots": num_slots, "num_gradient_buffers": num_buffers}
        expected = trained(is_dry, "synchronous", steps, **options)
        for variant in variants:
            found = trained(is_dry, variant, steps, **options)
            wrong = [name for name, value in expected.items() if not same(found[name], value)]
            record.append("runs", {**options, "variant": variant, "steps": steps, "differing": wrong[:5]})
            failures += wrong
    assert not failures, (
        f"a race: {len(failures)} values differ from the synchronous run, first {failures[0]}"
    )


def same(actual: Any, expected: Any) -> bool:
    """Compare bits, so that NaN equals NaN."""
    import torch

    return torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def trained(is_dry: bool, variant: str, steps: int, **options: Any) -> dict[str, Any]:
    """Train uneven blocks under one kind of delay; returns losses, norms and the final masters."""
    import torch

    import megatrain

    chance = random.Random(f"{variant} {options}")
    model = uneven_model(is_dry)
    if variant in ("slow_compute", "slow_both") and not is_dry:
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: doze(chance))
            layer.mlp.register_forward_hook(lambda module, args, output: doze_in_backward(output, chance))
    lanes = lanes_for(variant, is_dry, chance)
    engine = megatrain.attach(model, device=lanes, precision="fp32", **options)
    optimizer = engine.adamw(**HYPER, max_grad_norm=1.0)
    generator = torch.Generator().manual_seed(1)
    losses, norms = [], []
    for step in range(steps):
        # Few tokens: copies of huge blocks outlast their compute. Every third step adds up two micro-batches.
        ids = [torch.randint(0, 256, (1, 16), generator=generator) for _ in range(1 + (step % 3 == 2))]
        losses.append(engine.forward_backward([{"input_ids": part, "labels": part} for part in ids]).cpu())
        norms.append(optimizer.step().grad_norm)
    values = {name: value.clone() for name, value in engine.named_masters()}
    engine.detach()
    assert torch.stack(losses).isfinite().all()
    assert min(norms) > 0
    return {"losses": torch.stack(losses), "norms": torch.tensor(norms), **values}


def uneven_model(is_dry: bool) -> Any:
    """Make a Llama whose layers are tiny and huge in turn."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, num_layers, widths = (32, 4, (16, 512)) if is_dry else (256, 10, (16, 16384))
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=widths[0],
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().train()
    for layer in model.model.layers[1::2]:
        layer.mlp.gate_proj = torch.nn.Linear(hidden, widths[1], bias=False)
        layer.mlp.up_proj = torch.nn.Linear(hidden, widths[1], bias=False)
        layer.mlp.down_proj = torch.nn.Linear(widths[1], hidden, bias=False)
    return model


def doze(chance: random.Random) -> None:
    """Keep the current stream busy for up to a millisecond or so."""
    import torch

    torch.cuda._sleep(chance.randrange(1, 2_000_000))


def doze_in_backward(output: Any, chance: random.Random) -> None:
    """Delay the backward at this place as well."""
    if output.requires_grad:
        output.register_hook(lambda _: doze(chance))


def lanes_for(variant: str, is_dry: bool, chance: random.Random) -> Any:
    """Make lanes with the delays of a variant."""
    from megatrain.stream import lanes

    if is_dry:
        machine = lanes.EmulatedMachine(jitter_s=1e-4, seed=chance.randrange(1 << 20))
        return lanes.InlineLanes() if variant == "synchronous" else lanes.EmulatedLanes(machine)
    import torch

    class Slow(lanes.CudaLanes):
        """Copies begin after a random delay."""

        def _submit(self, lane: Any, function: Callable[[], object], nbytes: int) -> None:
            def late() -> None:
                if lane is not lanes.Lane.HOST:
                    doze(chance)
                function()

            super()._submit(lane, late, nbytes)

    class Synchronous(lanes.CudaLanes):
        """The device is idle before and after every copy."""

        def _submit(self, lane: Any, function: Callable[[], object], nbytes: int) -> None:
            torch.cuda.synchronize(self.device)
            super()._submit(lane, function, nbytes)
            torch.cuda.synchronize(self.device)

    kinds = {"synchronous": Synchronous, "slow_copies": Slow, "slow_both": Slow}
    return kinds.get(variant, lanes.CudaLanes)(device_of(is_dry))


# -- speed -------------------------------------------------------------------------------------------------


def shape_of(name: str, is_dry: bool) -> dict[str, Any]:
    """Return a Llama's sizes: those of Llama 3.2 1B and Llama 3 8B."""
    if is_dry:
        return {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": name == "1b"}  # fmt: skip
    shapes = {
        "1b": (2048, 8192, 16, 32, 8, True),
        "8b": (4096, 14336, 32, 32, 8, False),
    }
    hidden, inner, layers, heads, groups, is_tied = shapes[name]
    return {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": 128256,
            "tie_word_embeddings": is_tied}  # fmt: skip


def speed(record: Record, is_dry: bool, shape: Mapping[str, Any], num_steps: int = 4) -> None:
    """Measure tokens/s at two sizes of a step."""
    import torch
    from transformers import LlamaConfig

    import megatrain

    device = device_of(is_dry)
    seq_len = 64 if is_dry else 1024
    config = LlamaConfig(**shape, max_position_embeddings=seq_len, use_cache=False)
    began = time.perf_counter()
    model = megatrain.load(config=config, seed=0, precision="bf16").train()
    load_s = time.perf_counter() - began
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    began = time.perf_counter()
    engine = megatrain.attach(model, device=device, precision="bf16", num_slots=2, activations="recompute")
    optimizer = engine.adamw(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
    record.add(
        shape=dict(shape),
        num_parameters=num_parameters,
        load_s=load_s,
        attach_s=time.perf_counter() - began,
        host_bytes=engine.host_bytes,
    )
    for rows in (2, 4) if is_dry else (8, 32):
        generator = torch.Generator().manual_seed(rows)
        ids = torch.randint(0, config.vocab_size, (rows, seq_len), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        losses, norms, whole_s, update_s = [], [], [], []
        moved = engine.bytes_fetched + engine.bytes_offloaded
        for _ in range(num_steps):
            synchronize(device)
            began = time.perf_counter()
            loss = engine.forward_backward([batch])
            synchronize(device)
            between = time.perf_counter()
            stats = optimizer.step()
            synchronize(device)
            whole_s.append(time.perf_counter() - began)
            update_s.append(time.perf_counter() - between)
            losses.append(loss.item())
            norms.append(stats.grad_norm)
        median_s = statistics.median(whole_s[1:])  # the first step touches memory and compiles the update
        nominal = nominal_flops(is_dry)
        flops = model_flops(config, num_parameters, seq_len) * ids.numel() / median_s
        record.append(
            "runs",
            {
                "tokens_per_step": ids.numel(),
                "tokens_per_s": ids.numel() / median_s,
                "step_s": {"median": median_s, "min": min(whole_s[1:]), "max": max(whole_s[1:])},
                "update_s": statistics.median(update_s[1:]),
                "model_flops_per_s": flops,
                "mfu_of_nominal": None if nominal is None else flops / nominal,
                "bytes_moved_per_step": (engine.bytes_fetched + engine.bytes_offloaded - moved) // num_steps,
                "device_bytes_peak": engine.device_bytes_peak,
                "losses": losses,
                "grad_norms": norms,
            },
        )
        assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
        assert min(norms) > 0, f"gradient norms are {norms}"
    engine.detach()


def model_flops(config: Any, num_parameters: int, seq_len: int) -> float:
    """Return the FLOPs of a token: forward and backward, causal attention at half, nothing recomputed."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return 6.0 * (num_parameters - embedding) + 6.0 * config.num_hidden_layers * width * seq_len


def nominal_flops(is_dry: bool) -> float | None:
    """Return the vendor's dense bf16 peak of the device, None if it is not in the table."""
    import torch

    name = "" if is_dry else torch.cuda.get_device_name()
    return next((flops for part, flops in NOMINAL_BF16_FLOPS.items() if part in name), None)


# -- the device --------------------------------------------------------------------------------------------


def device_of(is_dry: bool) -> Any:
    """Return the device of the run."""
    import torch

    return torch.device("cpu" if is_dry else "cuda:0")


def synchronize(device: Any) -> None:
    """Wait for the device, if it is one that must be waited for."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def be_deterministic() -> None:
    """Choose kernels whose result does not depend on timing, and full fp32 products."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)


if __name__ == "__main__":
    main()
