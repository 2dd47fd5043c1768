"""One long row on one rank and on several that share out its tokens: the same step, and the memory of each.

    python -m benchmarks.distributed.long_rows [--ranks 2] [--tokens 65536] [--layers 2] [--hidden 64]
        [--heads 2] [--without-one] [--out FILE]

A random llama trains one step of one row in fp32, every layer recomputed, on real processes. Loss and
gradients are held against those of one rank (`--without-one` leaves that out). Beside the plan's bytes stands
by how much each process has grown at its peak, from before it made the model; a step of a tiny model comes
before, which loads what is loaded once. The C library gives freed memory back at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import emit, hardware

VOCABULARY = 1024
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Of glibc, which else keeps what is freed."""


def main() -> None:
    """Train the row, and compare."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--without-one", action="store_true", help="do not compare with one rank")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    os.environ.update(MALLOC)  # of the processes that are started
    found = run(arguments.ranks, arguments)
    for each in found:
        print(told(each), flush=True)
    result: dict[str, Any] = {"hardware": hardware(), "arguments": vars(arguments)}
    result["ranks"] = [{name: each[name] for name in each if name != "gradients"} for each in found]
    if not arguments.without_one:
        (one,) = run(1, arguments)
        print(told(one), flush=True)
        result["one"] = {name: one[name] for name in one if name != "gradients"}
        result["loss_differs"] = abs(found[0]["loss"] - one["loss"]) / abs(one["loss"])
        result["gradients_differ"] = furthest(found[0]["gradients"], one["gradients"])
        print(f"differs by {result['loss_differs']:.2g} (loss), {result['gradients_differ']:.2g} (gradients)")
    emit(result, arguments.out)


def told(each: dict[str, Any]) -> str:
    """Say in a line what a rank has done."""
    planned, grown = each["planned_bytes"], each["grown_bytes"]
    return (
        f"rank {each['rank']} of {each['size']}: loss {each['loss']:.7f}, norm {each['norm']:.7f}, "
        f"{each['step_s']:.1f} s; grown by {grown / 2**20:.1f} MiB, planned {planned / 2**20:.1f} MiB "
        f"({grown / planned - 1:+.1%}); swapped {each['swapped_bytes']:,} bytes, planned "
        f"{each['planned_swapped_bytes']:,}"
    )


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a parameter's gradient, by its norm."""
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


def run(size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the row once on so many ranks, and return what each says, in order."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        processes = [
            context.Process(target=rank_main, args=(rank, size, place, vars(arguments), answers))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found = [answers.get(timeout=7200) for _ in processes]
        for process in processes:
            process.join()
        for each in found:
            if each["rank"] == 0:
                each["gradients"] = torch.load(Path(place, "gradients.pt"))
    return sorted(found, key=lambda each: int(each["rank"]))


def rank_main(rank: int, size: int, place: str, given: dict[str, Any], answers: Any) -> None:
    """Train the row as one rank, on one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    from megatrain.distributed.ranks import Ranks

    ranks = None
    if size > 1:
        store = dist.FileStore(str(Path(place, "store")), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ranks = Ranks(store, 7200.0)
    _train({**given, "tokens": 64}, None)
    base = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    found, gradients = _train(given, ranks)
    found |= {"rank": rank, "size": size, "grown_bytes": memory("VmHWM") - base}
    if rank == 0:
        torch.save(gradients, Path(place, "gradients.pt"))
    answers.put(found)
    if ranks is not None:
        ranks.meet()
        dist.destroy_process_group()


def _train(given: dict[str, Any], ranks: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    import megatrain
    from megatrain.config.choice import Choice, StepBatch, part_of
    from megatrain.model.profile.count import count_model
    from megatrain.plan.search.planner import plan_of
    from megatrain.plan.search.request import Request
    from megatrain.stream.lanes.devices import make_lanes
    from megatrain.stream.machine import machine_of

    tokens, size = given["tokens"], 1 if ranks is None else ranks.size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=given["hidden"],
        intermediate_size=3 * given["hidden"],
        num_hidden_layers=given["layers"],
        num_attention_heads=given["heads"],
        max_position_embeddings=tokens,
    )
    model = LlamaForCausalLM(config).train()
    shape = {"micro_batch_size": 1, "seq_len": tokens}
    batch = StepBatch(**shape, num_micro_batches=1, sequence=size)
    choice, part = part_of(size, Choice().with_defaults(given["layers"]), batch)
    assert part is not None
    anatomy = count_model(model, **shape, precision="fp32", device_type="cpu", sequence=size)
    plan = plan_of(
        Request(spec=machine_of(make_lanes("cpu"), "fp32"), anatomy=anatomy, batch=part, choice=choice),
        choice,
    )
    engine = megatrain.attach(model, choice, batch=batch, ranks=ranks)
    optimizer = engine.adamw()
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    before, began = engine.counts.swapped_bytes, time.perf_counter()
    loss = float(engine.forward_backward([{"input_ids": ids, "labels": ids}]))
    gradients = {name: each.clone() for name, each in engine.named_gradients()}
    norm = optimizer.step().grad_norm
    engine.sync()
    return {
        "loss": loss,
        "norm": norm,
        "step_s": time.perf_counter() - began,
        "planned_bytes": plan.tier_bytes("ram"),
        "planned_pools": {pool.name: pool.nbytes for pool in plan.pools},
        "swapped_bytes": engine.counts.swapped_bytes - before,
        "planned_swapped_bytes": plan.bytes_per_step["swapped"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }, gradients


def memory(field: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


if __name__ == "__main__":
    main()
