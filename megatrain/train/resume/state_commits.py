"""State on drives from the side of a run: its owner, the contents of a commit, and the resume from it."""

from __future__ import annotations

import base64
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from megatrain.config import Config
from megatrain.config.choice import Choice
from megatrain.errors import CheckpointError
from megatrain.model.weights.skeleton import persistent_buffers
from megatrain.store.drives.places import drive_errors
from megatrain.store.drives.record import (
    PREPARED_NAME,
    RECORD_NAME,
    CommitRecord,
    newest_of_all,
    nothing_in_common,
    read_record,
)
from megatrain.store.placement import Tiers

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)


def tiers_of(config: Config, choice: Choice | None = None, *, resumes: bool = False) -> Tiers | None:
    """Return the tiers of a run's state; None if it has no drives, or needs none and commits nothing there.

    Args:
        config: The settings of the run.
        choice: The choice in force; None takes what the settings say.
        resumes: Whether the run resumes from what is committed there.
    """
    memory = config.memory
    count = config.train.grad_accumulation if config.is_decided else 1  # else only places are asked for
    if not memory.drives:
        return None
    known = replace(Choice(lockstep=count), **(choice or config.choice).given)
    is_in_ram = choice is not None and choice.is_resolved and not choice.tiers
    if is_in_ram and not (known.uses_drives or memory.commits or resumes):
        return None
    tiers = Tiers(
        nvme=tuple(map(Path, memory.drives)),
        ram=memory.host_budget,
        owner=str(Path(config.out).absolute()),
        keeps_gradients=not known.uses_gradients_up(count),
        resumes=resumes,
    )
    return tiers.with_state_in_ram() if is_in_ram else tiers


@contextmanager
def drives_apart(config: Config) -> Iterator[Config]:
    """Give a temporary run directories of its own on the drives, and remove them at the end.

    Its few steps wear out nothing, however many the settings have.
    """
    if not config.memory.drives:
        yield config
        return
    made: list[Path] = []
    try:
        for directory in map(Path, config.memory.drives):
            with drive_errors("make a directory in", directory):
                directory.mkdir(mode=0o700, exist_ok=True)
                made.append(Path(tempfile.mkdtemp(prefix="trace-", dir=directory)))
        assert config.memory.tiers != "auto"
        tiers = config.memory.tiers.model_copy(update={"nvme": tuple(map(str, made))})
        memory = config.memory.model_copy(update={"tiers": tiers, "accept_wear": True})
        yield config.model_copy(update={"memory": memory})
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)


def held_by_nodes(config: Config, ranks: Ranks | Alone) -> list[list[int]]:
    """Return `held_by` of every node; every rank calls it.

    Raises:
        CheckpointError: A record is damaged.
    """
    mine = held_by(config, ranks.node, ranks.num_nodes) if ranks.local_rank == 0 else None
    return ranks.gather_values(mine, "orders")[:: ranks.local_size]


def held_by(config: Config, node: int = 0, num_nodes: int = 1) -> list[int]:
    """Return the run's committed and prepared step on a node's drives, -1 for none.

    Raises:
        CheckpointError: A record is damaged.
    """
    records = (_record(config, node, num_nodes, name) for name in (RECORD_NAME, PREPARED_NAME))
    return [-1 if record is None else record.step for record in records]


def find_commit(
    config: Config, *, is_run: bool, held: Sequence[Sequence[int]], saved: int
) -> CommitRecord | None:
    """Return the commit from which the run resumes; None without drives, or without a newer step there.

    State of another run is left to the code that opens the drives, which refuses it.

    Args:
        config: The settings of the run.
        is_run: Whether its directory is there; otherwise state on the drives is of a removed run.
        held: The steps that `held_by_nodes` returns, of which this node is the first.
        saved: The step of the newest checkpoint; -1 if there is none.

    Raises:
        CheckpointError: The record is damaged, the nodes have no step in common, or their number has changed
            from or to one.
    """
    tiers, newest = tiers_of(config), max(committed for committed, _ in held)
    if tiers is None:
        return None
    where = tiers.of_node(0, len(held))[0]
    if not is_run:
        if newest >= 0:
            text = "%s holds step %d of a run whose directory is gone; it is overwritten"
            _log.warning(text, where, newest)
        return None
    others = 2 if len(held) == 1 else 1
    step = held_by(config, 0, others)[0]
    if step > max(saved, newest):
        were, are = ("several nodes were", "one is") if others > 1 else ("one node was", "several are")
        raise CheckpointError(
            f"{tiers.of_node(0, others)[0]} holds step {step} of this run, when {were} training, and {are} "
            f"now; start as many as then, or remove {RECORD_NAME} there to go on from the newest checkpoint"
        )
    steps = [[step for step in pair if step >= 0] for pair in held]
    common = newest_of_all(steps)
    if common is None and newest > saved:  # all go back from a step that only some nodes have prepared
        raise CheckpointError(nothing_in_common(steps, where))
    if common is None or common <= saved:
        return None
    found = (_record(config, 0, len(held), name) for name in (RECORD_NAME, PREPARED_NAME))
    return next(record for record in found if record is not None and record.step == common)


def _record(config: Config, node: int, num_nodes: int, name: str) -> CommitRecord | None:
    """Read a record of the run on a node's drives."""
    tiers = tiers_of(config)
    found = None if tiers is None else read_record(tiers.of_node(node, num_nodes)[0], name)
    return found if tiers is not None and found is not None and found.owner == tiers.owner else None


def laid_out_as(committed: Mapping[str, Any] | None, config: Config) -> Config:
    """Return the settings of a run with `fragments` and `expert_chunks`, where they are `auto`, as committed.

    The run is planned as one that commits, since its state is on the drives already; without committed state
    the settings stay as they are.
    """
    if committed is None:
        return config
    changes: dict[str, Any] = {"commit_every": config.memory.commit_every or 1}
    if config.memory.fragments == "auto":
        changes["fragments"] = bool(committed["fragments"])
    if config.memory.expert_chunks == "auto":
        changes["expert_chunks"] = committed.get("expert_chunks", 1)
    return config.model_copy(update={"memory": config.memory.model_copy(update=changes)})


def require_laid_out(committed: Mapping[str, Any], choice: Choice, where: str) -> None:
    """Refuse a choice by which the state would be laid out otherwise than it is on the drives.

    Args:
        committed: The record of the commit from which the run resumes.
        choice: The choice, in which nothing is open.
        where: The first directory of the drives.

    Raises:
        CheckpointError: A setting has changed; the sentence names it.
    """
    for name, before in (("fragments", False), ("expert_chunks", 1)):
        written, wanted = committed.get(name, before), getattr(choice, name)
        if wanted != written:
            written, wanted = (json.dumps(value) for value in (written, wanted))
            raise CheckpointError(
                f"memory.{name} is {wanted}, and the state in {where} was written with {written}; use "
                f"memory.{name}={written} or auto, or remove {RECORD_NAME} there to go on from the newest "
                f"checkpoint"
            )


def encode_buffers(model: nn.Module) -> dict[str, Any]:
    """Return the saved buffers of a model as plain JSON values; they are nearly always few and small."""
    return {
        name: {
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "shape": list(buffer.shape),
            "data": base64.b64encode(_raw(buffer).tobytes()).decode(),
        }
        for name, buffer in persistent_buffers(model).items()
    }


def restore_buffers(model: nn.Module, encoded: Mapping[str, Any]) -> None:
    """Undo `encode_buffers`."""
    buffers = persistent_buffers(model)
    for name, values in encoded.items():
        dtype = getattr(torch, values["dtype"])
        raw = torch.frombuffer(bytearray(base64.b64decode(values["data"])), dtype=torch.uint8)
        buffers[name].copy_(raw.view(dtype).view(values["shape"]))


def _raw(buffer: torch.Tensor) -> np.ndarray[Any, Any]:
    return buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
