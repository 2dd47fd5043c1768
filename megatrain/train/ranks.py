"""A run of several ranks: the first one decides and writes, and the others take the steps that it orders.

The ranks of a node map one shared state, so the first rank samples, saves and exports it as if it were alone,
while the others wait for the next order. Batches of evaluation are shared out. State of other nodes, and what
is on devices alone, comes to the first rank block by block.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.checkpoint.format import fingerprint
from megatrain.checkpoint.load import verify
from megatrain.config import Config
from megatrain.config.choice import Choice
from megatrain.config.decided import with_budget, with_micro_batches
from megatrain.config.read_choice import as_values, from_values
from megatrain.config.sizes import counted
from megatrain.distributed.signals import stop_signals
from megatrain.errors import CheckpointError, ConfigError
from megatrain.hardware.accelerators import VENDORS
from megatrain.hardware.care import Care
from megatrain.hardware.cores import allowed_cpus
from megatrain.stream.engine import Engine
from megatrain.stream.lanes.devices import compute_device
from megatrain.train.resume.changes import flatten

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

STEP, EVALUATE, COMMIT, SETTLE, LEND, END = "step", "evaluate", "commit", "settle", "lend", "end"
"""The orders of the first rank. After `SETTLE` the others bring home what is newer on their devices, before
the first rank reads it; `LEND`, with a block's number, lends it what their nodes and devices have of it."""


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


@contextmanager
def step_of_all(ranks: Ranks | Alone, engine: Engine) -> Iterator[None]:
    """Let the other ranks take the step that this one, the first, takes inside."""
    ranks.tell(STEP)
    _let_others(ranks, engine, _refuse_within_a_step)
    try:
        yield
    except BaseException:
        _let_others(ranks, engine, _refuse_after_an_error)
        raise
    read_alone(ranks, engine)


def read_alone(ranks: Ranks | Alone, engine: Engine) -> None:
    """Let the others `lend` the state that this one, the first, reads from now on."""
    _let_others(ranks, engine, lambda *block: ranks.tell([LEND, *block] if block else SETTLE))


def lend(engine: Engine, order: Any) -> None:
    """Obey `read_alone` on a rank that is not the first."""
    engine.settle()
    if order != SETTLE:
        assert order[0] == LEND
        engine.host.lend(order[1])


def _let_others(ranks: Ranks | Alone, engine: Engine, call: Callable[..., object]) -> None:
    """Call `call`, with a block or none, whenever the first rank is about to read what other ranks have."""
    if ranks.size == 1:  # it has everything, and may read at any time
        return
    engine.arrangement.call_others = call
    engine.host.call_others = call


def _refuse_within_a_step(*_: int) -> None:
    raise ConfigError(
        "a callback has read weights or state within a step, while ranks have newer ones on their devices or "
        "nodes; read them in on_step_end"
    )


def _refuse_after_an_error(*_: int) -> None:
    raise ConfigError(
        "a step has failed on the first rank, while others are in it, so nothing can be read of the state "
        "that they have; go on from the newest checkpoint"
    )


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


def require_checkpoint(ranks: Ranks | Alone, path: Path, name: str) -> None:
    """Refuse to resume from a checkpoint that this rank's node does not have, or of which it has another one.

    Args:
        ranks: The ranks, of which this one is not the first.
        path: The path at which the first one has found and verified it.
        name: The `fingerprint` of its manifest.

    Raises:
        CheckpointError: The node lacks the checkpoint, it is damaged there, or it is another one.
    """
    try:
        manifest = verify(path, digests=ranks.node > 0 and ranks.local_rank == 0)
    except CheckpointError as error:
        raise CheckpointError(
            f"node {ranks.node}: {error}. Every node reads the checkpoint: put the run on a file system that "
            "all share, or a copy of the checkpoint in its place"
        ) from error
    if fingerprint(manifest) != name:
        raise CheckpointError(
            f"node {ranks.node} has another checkpoint at {path} than rank 0; put a copy of that one there"
        )


def count_written(care: Care, ranks: Ranks | Alone) -> None:
    """Count the bytes that the other ranks have written to drives; every rank calls it."""
    own = care.own_written_bytes() or 0
    care.count_others(sum(map(int, ranks.gather(torch.tensor(own)))) - own)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals, since the first rank finishes the step, saves, and ends the others."""
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
