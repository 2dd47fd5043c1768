"""Bytes of host memory that ranks take, as the kernel counts them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from megatrain.config.choice import StepBatch
from megatrain.stream.attach.attach import attach
from megatrain.stream.attach.load import load

_TOKENS = 2


def measure(
    ranks: Any, *, num_runs: int, updates: str, lockstep: int = 1, fields: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train a model of 21M parameters for a step, and say which memory this rank has mapped for it.

    Returns:
        `shared`: bytes of pages in mappings that all ranks of a node have, each page counted in parts by
        those who have it; `own`: of this rank's own mappings for planes; `planes`: what it believes to
        have; `num_params`; `num_on_device`: how many of these are on the device alone.
    """
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    batch = StepBatch(micro_batch_size=1, seq_len=_TOKENS, num_micro_batches=num_runs, num_runs=num_runs)
    settings: dict[str, Any] = {"precision": "bf16", "batch": batch, "ranks": ranks}
    settings |= {"lockstep": lockstep, "fragments": False, "updates": updates, **(fields or {})}
    model = load(config=config, **settings).train()
    engine = attach(model, device="cpu", **settings)
    optimizer = engine.adamw(max_grad_norm=1.0 if updates == "deferred" else None)
    own = engine.parts(num_runs)[0 if ranks is None else ranks.rank]
    ids = torch.arange(num_runs * _TOKENS).view(num_runs, 1, _TOKENS)
    engine.forward_backward([{"input_ids": row, "labels": row} for row in ids[own]])
    optimizer.step()
    for _ in engine.named_masters():  # other nodes' state comes and goes
        pass
    engine.settle()
    if ranks is not None:
        ranks.meet()
    found = _mapped(engine.host)
    if ranks is not None:
        ranks.meet()
    num_params = sum(parameter.numel() for parameter in model.parameters())
    there = sum(engine.host.layouts[block].num_parameters for block in engine.host.on_device.held)
    numbers = {"num_params": num_params, "num_on_device": there}
    return found | {"planes": engine.host.plane_bytes, **numbers}


def _mapped(host: Any) -> dict[str, int]:
    """Add up the pages of planes that are in memory."""
    arenas = [*host.planes.arenas.values(), *host.planes.apart.values()]
    views = [arena.view(torch.uint8, 0, arena.nbytes) for arena in arenas if arena.nbytes]
    ranges = [(view.data_ptr(), view.data_ptr() + view.numel()) for view in views]
    shared, own, is_plane = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            here = [pair for pair in ranges if start < pair[1] and pair[0] < stop]
            is_plane = bool(here) and "memfd" in line
            if not is_plane:  # the kernel joins mappings that adjoin: of these, pages are counted one by one
                own += sum(_pages(max(start, begin), min(stop, last)) for begin, last in here)
        elif first == "Pss:" and is_plane:
            shared += 1024 * int(rest[0])
    return {"shared": shared, "own": own}


def _pages(start: int, stop: int) -> int:
    """Return the bytes of the pages of a range that are in memory."""
    size = mmap.PAGESIZE
    first, last = start // size, -(-stop // size)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = torch.frombuffer(bytearray(file.read(8 * (last - first))), dtype=torch.int64)
    return size * int((entries < 0).sum())  # the highest bit says it
