"""How much faster two ranks are than one, each on a core of its own, at the same step with the same bits.

    python -m benchmarks.distributed.ranks_on_cpu [--ranks 2] [--pairs 5] [--steps 4] [--layers 8]
        [--hidden 512] [--micro-batches 2] [--rows 4] [--tokens 1024] [--out FILE]

A random llama is trained in fp32 with clipping, first by one process, then by several, in turns. All have
`num_runs` equal to the most ranks, so that they make the same additions; the digests of all weights after the
last step must be equal. The time of a step is from one `engine.sync()` to the next, the first step is not
counted, and of a run it is the median of the others, on the rank that is slowest. The result is the median of
the ratios within pairs.

Beside it stands what the machine allows: as many processes at a time as there are ranks, each with its part
of the step and a whole model of its own, that exchange nothing and update everything alone (`apart`).
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import emit, hardware, spread

LR = 1e-3


def main() -> None:
    """Time both in turns, and compare them."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each run, after one that is not counted")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step")
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    several = arguments.ranks
    seconds: dict[str, list[float]] = {"one": [], "ranks": [], "apart": []}
    digests, numel = set(), 0
    for pair in range(arguments.pairs):
        for name, size in (("one", 1), ("ranks", several), ("apart", several)):
            found = run(size, arguments, is_joined=name != "apart")
            seconds[name].append(max(one["step_s"] for one in found))
            if name != "apart":
                digests |= {one["digest"] for one in found}
            numel = found[0]["parameters"]
        last = {name: times[-1] for name, times in seconds.items()}
        told = ", ".join(f"{name} {last['one'] / last[name]:.3f}" for name in ("ranks", "apart"))
        print(f"pair {pair + 1}: {told}", flush=True)
    assert len(digests) == 1, f"the bits differ: {digests}"
    ratios = {
        name: [one / other for one, other in zip(seconds["one"], seconds[name], strict=True)]
        for name in ("ranks", "apart")
    }
    median = {name: statistics.median(values) for name, values in ratios.items()}
    tokens = arguments.micro_batches * arguments.rows * arguments.tokens
    print(
        f"{several} ranks: {median['ranks']:.3f} times as fast as one, at equal bits; processes that share "
        f"nothing: {median['apart']:.3f}"
    )
    result = {
        "hardware": hardware(),
        "arguments": vars(arguments),
        "parameters": numel,
        "tokens_per_step": tokens,
        "step_s": {name: spread(times) for name, times in seconds.items()},
        "speedup": spread(ratios["ranks"]),
        "speedup_apart": spread(ratios["apart"]),
        "digest": digests.pop(),
    }
    emit(result, arguments.out)


def run(size: int, arguments: argparse.Namespace, *, is_joined: bool) -> list[dict[str, Any]]:
    """Train once on so many ranks, or on processes that are apart; return what each says."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        processes = [
            context.Process(
                target=rank_main, args=(rank, size, place if is_joined else None, vars(arguments), answers)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found = [answers.get(timeout=1800) for _ in processes]
        for process in processes:
            process.join()
    return found


def rank_main(rank: int, size: int, place: str | None, given: dict[str, Any], answers: Any) -> None:
    """Train as one rank, on one core; without a place to meet, on its part of the step alone."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    from transformers import LlamaConfig, LlamaForCausalLM

    import megatrain
    from megatrain.config.choice import Choice, StepBatch
    from megatrain.distributed.ranks import Ranks

    ranks = None
    if size > 1 and place is not None:
        store = dist.FileStore(str(Path(place, "store")), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ranks = Ranks(store, timeout_s=1800.0)
    hidden = given["hidden"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 64 * 64,
        num_hidden_layers=given["layers"],
        num_attention_heads=hidden // 64,
        max_position_embeddings=given["tokens"],
    )
    model = LlamaForCausalLM(config).train()
    count = given["micro_batches"]
    batch = StepBatch(
        micro_batch_size=given["rows"],
        seq_len=given["tokens"],
        num_micro_batches=count if place is not None else count // size,
        num_runs=given["ranks"] if place is not None else given["ranks"] // size,
    )
    choice = Choice().with_defaults(given["layers"])
    engine = megatrain.attach(model, choice, batch=batch, ranks=ranks)
    optimizer = engine.adamw(lr=LR, max_grad_norm=1.0)
    apart = [[*range(one * count // size, (one + 1) * count // size)] for one in range(size)]
    parts = apart if ranks is None else engine.parts(count)
    times = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(given["steps"] + 1):
        ids = torch.randint(1024, (count, given["rows"], given["tokens"]), generator=generator)
        own = [ids[number] for number in parts[rank]]
        began = time.perf_counter()
        engine.forward_backward([{"input_ids": part, "labels": part} for part in own])
        optimizer.step()
        engine.sync()
        times.append(time.perf_counter() - began)
    digest = hashlib.sha256()
    for _, master in engine.named_masters():
        digest.update(master.numpy().tobytes())
    answers.put(
        {
            "step_s": statistics.median(times[1:]),
            "digest": digest.hexdigest(),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
    )
    if ranks is not None:
        ranks.meet()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
