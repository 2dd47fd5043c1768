"""A streamed training step against the same step of resident PyTorch, side by side, in fp32 on the CPU.

    python -m benchmarks.training.streaming [--quick] [--pairs N] [--out FILE]

A step is forward, backward, clipping and AdamW on a Llama of about 100M parameters. Both sides start from
equal weights, see the same batches, use the same number of threads, and take turns; a ratio is the median
over the pairs of the ratio within a pair, so that a busy machine disturbs both. The resident side is torch
at its best: sdpa, fused AdamW, clip_grad_norm_, gradients set to None. Losses must be equal bit for bit in
every pair, and fall.

- `streamed_over_resident_recompute`: tokens/s, 4096 tokens per step; the rival checkpoints every layer
  (transformers' gradient checkpointing, non-reentrant).
- `streamed_over_resident_keep`: likewise, activations kept on both sides.
- `streamed_over_roofline_128`: 128 tokens per step, where copies weigh. The roofline is a step that takes
  as long as the resident one plus the time in which the bytes that the engine moves could be copied
  (torch's copy_ between two large host buffers, measured in every pair; a byte counts once). Activations
  are kept: of both policies that has the least compute to hide a copy behind.

Large steps take their turns until `--pairs` are measured, or, on a slow or busy machine, until the time is
up with at least three; the number of pairs is in the result.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import emit, hardware, spread
from megatrain.optim.pool import worker_threads
from megatrain.stream.engine import Engine
from tests.reference import attach_plainly

Batch = dict[str, Tensor]
Step = Callable[[], Tensor]

HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_GRAD_NORM = 100.0
"""Above every norm of the run: both sides do all of clipping's work and multiply by exactly 1. The two norms
differ in their last bits (order of additions), which a factor below 1 would carry into the weights."""
MIN_PAIRS = 3
"""Fewer than these make no median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The model and the batches of a run."""

    hidden_size: int = 768
    intermediate_size: int = 2048
    num_layers: int = 6
    num_heads: int = 12
    vocab_size: int = 32000
    rows: int = 8
    """Sequences of the large step."""
    seq_len: int = 512
    """Tokens per sequence of the large step."""
    small_tokens: int = 128
    """Tokens of the small step: one sequence."""
    copy_bytes: int = 512 << 20
    """Size of the buffers between which the copy rate is measured."""


QUICK = Shape(
    hidden_size=128, intermediate_size=352, num_layers=3, num_heads=4, vocab_size=2048, rows=2, seq_len=128,
    copy_bytes=32 << 20,
)  # fmt: skip


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of large steps (default: 5)")
    parser.add_argument("--small-pairs", type=int, default=12, help="pairs of small steps (default: 12)")
    parser.add_argument(
        "--seconds", type=float, default=190.0, help="time for each comparison of large steps"
    )
    parser.add_argument("--only", choices=["recompute", "keep", "roofline"], help="run one comparison only")
    parser.add_argument(
        "--quick", action="store_true", help="tiny model: checks the script, measures nothing"
    )
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    shape = Shape()
    if arguments.quick:
        shape, arguments.pairs, arguments.small_pairs = QUICK, MIN_PAIRS, MIN_PAIRS
    torch.set_num_threads(worker_threads())
    started = time.perf_counter()
    large = make_batch(shape, shape.rows, shape.seq_len)
    small = make_batch(shape, 1, shape.small_tokens)
    run = functools.partial(compare, shape, warm_up=small)
    ratios: dict[str, float] = {}
    details: dict[str, Any] = {}
    if arguments.only in (None, "roofline"):
        for policy, share in (("keep", 1), ("recompute", 2)):
            pairs = max(MIN_PAIRS, arguments.small_pairs // share)
            key = "streamed_over_roofline_128" + ("" if policy == "keep" else "_recompute")
            details[key] = run(policy=policy, batch=small, pairs=pairs, seconds=45.0, counts_copies=True)
            ratios[key] = report(key, details[key], "of_roofline")
    for policy in ("recompute", "keep"):
        if arguments.only in (None, policy):
            key = f"streamed_over_resident_{policy}"
            details[key] = run(policy=policy, batch=large, pairs=arguments.pairs, seconds=arguments.seconds)
            ratios[key] = report(key, details[key], "of_resident")
    config = {**asdict(shape), "threads": torch.get_num_threads(), "quick": arguments.quick, **HYPER}
    config["num_parameters"] = sum(p.numel() for p in build(shape, on_meta=True).parameters())
    result = {
        "benchmark": "streaming",
        **ratios,
        "details": details,
        "config": config,
        "hardware": hardware(),
        "seconds": time.perf_counter() - started,
    }
    emit(result, arguments.out)


def compare(
    shape: Shape,
    *,
    policy: str,
    batch: Batch,
    warm_up: Batch,
    pairs: int,
    seconds: float,
    counts_copies: bool = False,
) -> dict[str, Any]:
    """Run one pair after the other, and return seconds, ratios and rates.

    Args:
        shape: The model.
        policy: Activations of both sides, `recompute` or `keep`.
        batch: What both sides train on, in every step.
        warm_up: Batch of two steps before: they touch all state, and compile the kernels.
        pairs: Measured pairs; the side that begins changes from pair to pair.
        seconds: Begin no further pair after this time, once there are `MIN_PAIRS`.
        counts_copies: Also measure the copy rate in every pair, and compare with the roofline.
    """
    model = build(shape)
    resident = make_resident(model, policy)
    engine, streamed = make_streamed(model, policy)
    for _ in range(2):
        assert torch.equal(resident(warm_up)(), streamed(warm_up)()), "streamed and resident differ"
    steps = {"resident": resident(batch), "streamed": streamed(batch)}
    copy = make_copy(shape.copy_bytes) if counts_copies else None
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: list[float] = []
    copy_rates: list[float] = []
    moved: set[int] = set()
    stop = time.perf_counter() + seconds
    while len(losses) < pairs and (len(losses) < MIN_PAIRS or time.perf_counter() < stop):
        before = engine.counts.fetch_bytes + engine.counts.offload_bytes
        results = {}
        for name in sorted(steps, reverse=len(losses) % 2 == 0):
            began = time.perf_counter()
            results[name] = steps[name]()
            times[name].append(time.perf_counter() - began)
        assert torch.equal(results["resident"], results["streamed"]), f"losses differ: {results}"
        losses.append(results["streamed"].item())
        moved.add(engine.counts.fetch_bytes + engine.counts.offload_bytes - before)
        if copy is not None:
            copy_rates.append(copy())
    engine.detach()
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    assert len(moved) == 1, f"the bytes moved per step change: {moved}"
    bytes_moved = moved.pop()
    tokens = batch["input_ids"].numel()
    both = list(zip(times["resident"], times["streamed"], strict=True))
    found: dict[str, Any] = {
        "tokens_per_step": tokens,
        "pairs": len(losses),
        "of_resident": spread([theirs / mine for theirs, mine in both]),
        "seconds": {name: spread(values) for name, values in times.items()},
        "tokens_per_s": {name: tokens / statistics.median(values) for name, values in times.items()},
        "bytes_moved_per_step": bytes_moved,
        "losses": losses,
    }
    if copy is not None:
        found["copy_bytes_per_s"] = spread(copy_rates)
        rooflines = [theirs + bytes_moved / rate for (theirs, _), rate in zip(both, copy_rates, strict=True)]
        found["of_roofline"] = spread([best / mine for best, (_, mine) in zip(rooflines, both, strict=True)])
    del model, resident, streamed, steps, engine
    gc.collect()
    return found


def report(name: str, found: dict[str, Any], ratio: str) -> float:
    """Print one comparison for a reader, and return its median."""
    rates = found["tokens_per_s"]
    print(
        f"{name}: {found[ratio]['median']:.3f} [{found[ratio]['min']:.3f}, {found[ratio]['max']:.3f}]"
        f"   streamed {rates['streamed']:.0f} tokens/s, resident {rates['resident']:.0f} tokens/s,"
        f" {found['bytes_moved_per_step'] / 2**30:.2f} GiB moved per step",
        flush=True,
    )
    return float(found[ratio]["median"])


def build(shape: Shape, *, on_meta: bool = False) -> LlamaForCausalLM:
    """Return a model with random fp32 weights, in training mode."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=max(shape.seq_len, shape.small_tokens),
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        return LlamaForCausalLM(config).float().train()


def make_batch(shape: Shape, rows: int, seq_len: int) -> Batch:
    """Return random tokens, the same ones for the same arguments: a model learns them by heart."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, shape.vocab_size, (rows, seq_len), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def make_resident(model: LlamaForCausalLM, policy: str) -> Callable[[Batch], Step]:
    """Return steps of plain torch on a copy of the model."""
    own = LlamaForCausalLM(model.config).train()
    own.load_state_dict(model.state_dict())
    if policy == "recompute":
        own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    groups = [
        {"params": [p for p in own.parameters() if p.ndim >= 2], "weight_decay": HYPER["weight_decay"]},
        {"params": [p for p in own.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=HYPER["lr"], betas=HYPER["betas"], eps=HYPER["eps"], fused=True)
    assert all(p.dtype == torch.float32 and p.numel() % 64 == 0 for p in own.parameters())

    def step(batch: Batch) -> Tensor:
        loss: Tensor = own(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(own.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert 0 < norm.item() < MAX_GRAD_NORM, f"grad_norm is {norm}"
        return loss.detach()

    return lambda batch: functools.partial(step, batch)


def make_streamed(model: LlamaForCausalLM, policy: str) -> tuple[Engine, Callable[[Batch], Step]]:
    """Attach an engine to the model, and return it with its steps."""
    engine = attach_plainly(model, device="cpu", precision="fp32", activations=policy)
    optimizer = engine.adamw(**HYPER, max_grad_norm=MAX_GRAD_NORM)

    def step(batch: Batch) -> Tensor:
        loss = engine.forward_backward([batch])
        stats = optimizer.step()
        assert 0 < stats.grad_norm < MAX_GRAD_NORM, f"grad_norm is {stats.grad_norm}"
        assert not stats.skipped
        return loss

    return engine, lambda batch: functools.partial(step, batch)


def make_copy(nbytes: int) -> Callable[[], float]:
    """Return a function that measures bytes per second of a copy between two buffers: the best of three."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    def once() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return nbytes / (time.perf_counter() - began)

    return lambda: max(once() for _ in range(3))


if __name__ == "__main__":
    main()
