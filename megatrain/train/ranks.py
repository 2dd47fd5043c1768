"""A run of several ranks: all go through the whole run as if they were alone, and each computes its part.

The first rank finds the checkpoint, plans, writes and prints, and tells the others what it has decided. What
depends on the clock, a signal or a callback is agreed on between two steps, where all ranks do as the first
one would. State that is on other nodes, or on devices alone, all ranks read together, block by block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.checkpoint.format import fingerprint
from megatrain.checkpoint.load import DamagedError, verify
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config import Config
from megatrain.config.choice import Choice
from megatrain.config.decided import with_budget, with_micro_batches
from megatrain.config.read_choice import as_values, from_values
from megatrain.config.sizes import counted
from megatrain.errors import CheckpointError, ConfigError
from megatrain.hardware.accelerators import VENDORS
from megatrain.hardware.cores import allowed_cpus
from megatrain.hardware.health import MachineHealth
from megatrain.stream.lanes.devices import compute_device
from megatrain.train.resume.changes import flatten

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks


def gathers_weights(wish: bool | None, device: str, ranks: Ranks | Alone) -> bool:
    """Return whether each rank fetches a piece of the weights and all gather them; all ranks decide that.

    Args:
        wish: The user's wish; None means where each device of a node reaches the memory of the others.
        device: The name of the device on which the run computes.
        ranks: The ranks that train together.
    """
    if wish is not None:
        return wish
    kind = compute_device(device).type
    return all(ranks.gather_values(kind in VENDORS and VENDORS[kind].reach_each_other(ranks.local_size)))


def described(ranks: Ranks | Alone, shards: int | None) -> str:
    """Describe the ranks, what they share in a node, and what decides their sums; empty for a single one."""
    if ranks.size == 1:
        return ""
    nodes = f" on {ranks.num_nodes} nodes" if ranks.num_nodes > 1 else ""
    cores = len(allowed_cpus())
    return (
        f"{ranks.size}{nodes}, with {counted(cores, 'core')} each and one state in a node's memory; "
        f"parallel.shards is {shards}: give it too, if the run may go on with another number"
    )


def settle_ranks(config: Config, ranks: Ranks | Alone) -> None:
    """Decide whether these ranks gather weights, if there are several."""
    if ranks.size > 1:
        ranks.gathers = gathers_weights(config.parallel.gathers, config.train.device, ranks)


def agreed(ranks: Ranks | Alone, choice: Choice, config: Config) -> tuple[Choice, Config]:
    """Return the first rank's plan: its choice, and settings with its size of micro-batches and its budget.

    Args:
        ranks: The ranks that train together.
        choice: The choice of this rank, which is used if it is the first.
        config: The settings of this rank; the first one's have nothing open.
    """
    size = config.train.micro_batch_size if config.is_decided else None
    values, size, budget = ranks.tell([as_values(choice), size, config.train.activation_budget])
    return from_values(values), with_budget(with_micro_batches(config, size), budget)


def require_same_run(ranks: Ranks | Alone, config: Config, facts: Mapping[str, Any]) -> None:
    """Refuse to train with ranks that would train something else.

    Args:
        ranks: The ranks that are about to begin.
        config: The settings of this one.
        facts: The other facts that have to be equal, by name, as plain values.

    Raises:
        ConfigError: A rank differs; the sentence says in what.
    """
    require_same(ranks, flatten(config.model_dump(mode="json")), facts)


def require_same(ranks: Ranks | Alone, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse ranks of which one has other settings or facts, as `require_same_run` does.

    Args:
        ranks: The ranks that are about to begin.
        settings: The settings by their keys, as plain values.
        facts: The facts, as in `require_same_run`.

    Raises:
        ConfigError: A rank differs; the sentence says in what.
    """
    if ranks.size == 1:  # there is nobody to compare with, and digests would be made for nothing
        return
    mine = {**settings, **{name: _short(value) for name, value in facts.items()}}
    first, *others = ranks.gather_values(mine)
    for rank, other in enumerate(others, start=1):
        differing = [key for key in first if first[key] != other.get(key)]
        if differing:
            key = differing[0]
            raise ConfigError(
                f"rank {rank} would train something else than rank 0: its {key} is {other.get(key)!r}, and "
                f"not {first[key]!r}; give every rank the same settings, files and versions"
            )


def _short(value: Any) -> Any:
    """Return a digest of a long value, and a short one as it is."""
    text = json.dumps(value, sort_keys=True, default=str)
    return value if len(text) <= 80 else "a digest of " + hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def in_turn(ranks: Ranks | Alone) -> Iterator[None]:
    """Let the first rank go ahead, then the first one of each other node, then the rest."""
    turn = 0 if ranks.rank == 0 else 1 if ranks.local_rank == 0 else 2
    for _ in range(turn):
        ranks.meet("orders")
    yield
    for _ in range(2 - turn):
        ranks.meet("orders")


def require_checkpoint(
    ranks: Ranks | Alone,
    path: Path,
    name: str,
    *,
    is_read_later: Callable[[str], bool] = lambda name: False,
) -> CheckpointReader | None:
    """Refuse to resume from a checkpoint that this rank's node does not have, or of which it has another one.

    Args:
        ranks: The ranks, of which this one is not the first.
        path: The path at which the first one has found and verified it.
        name: The `fingerprint` of its manifest.
        is_read_later: Says of the name of a file whether it is compared as it is loaded.

    Returns:
        The reader of the first rank of a node, which compares what it reads of these files; None of others.

    Raises:
        CheckpointError: The node lacks the checkpoint, it is damaged there, or it is another one.
    """
    reads = ranks.node > 0 and ranks.local_rank == 0
    with node_named(ranks, CheckpointError):
        manifest = verify(path, digests=reads, is_later=is_read_later)
    if fingerprint(manifest) != name:
        raise CheckpointError(
            f"node {ranks.node} has another checkpoint at {path} than rank 0; put a copy of that one there"
        )
    later = [entry.name for entry in manifest.files if is_read_later(entry.name)]
    return CheckpointReader(path, manifest, later) if reads else None


@contextmanager
def node_named(ranks: Ranks | Alone, kind: type[CheckpointError] = DamagedError) -> Iterator[None]:
    """Name a node after the first one in errors about the checkpoint that it reads, and say what it needs.

    Raises:
        CheckpointError: The body fails with an error of this kind.
    """
    try:
        yield
    except kind as error:
        if ranks.rank == 0:
            raise
        raise CheckpointError(
            f"node {ranks.node}: {error}. Every node reads the checkpoint: put the run on a file system that "
            "all share, or a copy of the checkpoint in its place"
        ) from error


def count_written(health: MachineHealth, ranks: Ranks | Alone) -> None:
    """Count the bytes that the other ranks have written to drives; every rank calls it."""
    own = health.own_written_bytes() or 0
    health.count_others(sum(map(int, ranks.gather(torch.tensor(own)))) - own)
