"""A run of one rank or of several, told as digests of all that it computes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatrain.config.choice import StepBatch
from megatrain.stream.engine import Engine
from tests.distributed.cases import TRAINED, add_gates, cut_at, micro_batches, settings_of
from tests.distributed.threads import RankLanes, ThreadRanks
from tests.expert_families import APART
from tests.families import FAMILIES
from tests.reference import Batch, attach_plainly, make_model
from tests.stream.runs import HYPER, family_config


def train(
    ranks: Any,
    *,
    family: str = "llama_tied",
    num_runs: int = 4,
    num_micro_batches: int = 4,
    steps: int = 3,
    dropout: bool = False,
    data: str = "plain",
    trained: str = "all",
    missing: str = "",
    updates: str = "deferred",
    state: str = "fp32",
    max_grad_norm: float | None = 0.5,
    device: Any = "ranks",
    reads: bool = True,
    commits: bool = False,
    gathers: bool = False,
    tile_tokens: int | None = None,
    passes: Callable[[Engine, Any, list[Batch], list[int]], Tensor] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a family, and return each step's loss, norm and digests of gradients and masters.

    Args:
        ranks: That train together; None: one.
        family: Of models; of those in `APART` where experts come in chunks.
        num_runs: Of a step.
        num_micro_batches: Of a step.
        steps: How many.
        dropout: Is on.
        data: One of `DATA`.
        trained: One of `TRAINED`.
        missing: One of `MISSING`; empty: the model has no gates.
        updates: As in `engine.adamw`.
        state: Likewise.
        max_grad_norm: Likewise.
        device: As in `attach`; `ranks`: lanes that prove their order among ranks.
        reads: Gradients and masters are read in every step: whoever reads waits for all that goes on. Of
            gradients that wait on the device each rank has its share, which nobody reads.
        commits: Every step is committed on the drives.
        gathers: Each rank fetches a piece of the weights.
        tile_tokens: The tokens of a tile of a row; None: rows pass whole.
        passes: What takes an engine, its ranks, and the micro-batches of a step with their seeds, and runs
            those of this rank; None: `pass_all`.
        settings: Of `attach`.
    """
    if ranks is not None:
        ranks.gathers = gathers
    kinds = APART if settings.get("expert_chunks", 1) > 1 else FAMILIES
    config = family_config(family, dropout=True) if dropout else kinds[family]()
    model = make_model(config)
    TRAINED[trained](model)
    if missing:
        add_gates(model)
    if device == "ranks":
        is_thread = isinstance(ranks, ThreadRanks)
        device = RankLanes(ranks.turns, ranks.rank) if is_thread else "checked"
    batch = StepBatch(
        micro_batch_size=2,
        seq_len=16,
        num_micro_batches=num_micro_batches,
        num_runs=num_runs,
        tile_tokens=tile_tokens,
    )
    engine = attach_plainly(
        model, device=device, batch=batch, ranks=ranks, optimizer_state=state, updates=updates, **settings
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=max_grad_norm)
    told: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "masters": []}
    for step in range(steps):
        batches = micro_batches(num_micro_batches, seed=step, data=data, missing=missing or "always")
        seeds = [100 * step + number for number in range(num_micro_batches)]
        loss = (passes or pass_all)(engine, ranks, batches, seeds)
        told["losses"].append(float(loss))
        if updates != "immediate" and reads and settings.get("gradients", "host") == "host":
            told["gradients"].append(digest_of(dict(engine.named_gradients())))
        stats = optimizer.step()
        if commits:
            engine.commit(step, {})
        if reads:
            told["norms"].append(stats.grad_norm)
            told["masters"].append(digest_of(dict(engine.named_masters())))
    told["end"] = digest_of(dict(engine.named_masters()))
    engine.close()
    return told


def pass_all(engine: Engine, ranks: Any, batches: list[Batch], seeds: list[int]) -> Tensor:
    """Run this rank's micro-batches of a step up to its update."""
    own = engine.parts(len(batches))[0 if ranks is None else ranks.rank]
    return engine.forward_backward([batches[n] for n in own], seeds=[seeds[n] for n in own])


def train_row(ranks: Any, *, row: dict[str, Any]) -> dict[str, Any]:
    """Train a model for a row of values of `AXES`."""
    with cut_at(row["cut"]):
        return train(ranks, **settings_of(row))


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Return a digest of named tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
