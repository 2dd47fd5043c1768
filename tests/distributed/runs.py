"""A whole run on several ranks, one of which may be killed."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from megatrain import files
from megatrain.checkpoint.load import newest_whole
from megatrain.layout import drive_chunks
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.plan.search.request import Request
from megatrain.store import on_drives
from megatrain.store.drives import system as calls
from megatrain.store.placement import Placement
from megatrain.train import loop
from megatrain.train.caller import Caller
from megatrain.train.loop import train
from megatrain.train.spikes import Spikes
from tests.checkpoint.faults import Watched
from tests.distributed import training  # noqa: F401  # forks of what has imported this have it too
from tests.searches import searched_for_a_moment
from tests.store.disks import Counted, Failing, Killed
from tests.train.faults.test_replay import Faulty
from tests.train.project import make_config

if TYPE_CHECKING:
    from transformers import TrainerCallback


def train_on_drives(
    ranks: Any,
    *,
    root: str,
    out: str,
    ram: int,
    killed: list[int] | None = None,
    how: str = "SIGKILL",
    **sections: Any,
) -> int:
    """Train with state on two drives, as `train_run` but without a checkpoint before the end.

    Returns how many blocks have their state there, as the first rank has decided.

    Args:
        ranks: As there, like what is not said here.
        root: As there.
        out: As there.
        ram: Bytes of state in RAM.
        killed: A rank, and the number of its call that changes something on a drive, in which it is killed.
        how: `full`: the drive is full then, and the rank is not killed.
        sections: As there.
    """
    is_killed = killed is not None and (0 if ranks is None else ranks.rank) == killed[0]
    calls.system = Counted()
    if killed is not None and is_killed:
        calls.system = Failing(at=killed[1]) if how == "full" else Killed(killed[1])
    drive_chunks.CHUNK_BYTES = PAGE_BYTES  # so that every rank has chunks of each block
    tiers = {"ram": ram, "nvme": [f"{root}/{out}-drive{number}" for number in range(2)]}
    memory = {"activations": "recompute", "fragments": False, "tiers": tiers}
    away: list[Placement] = []
    place = on_drives.place

    def noted(*arguments: Any, **keywords: Any) -> Placement:
        away.append(place(*arguments, **keywords))
        return away[-1]

    on_drives.place = noted
    train_run(ranks, root=root, out=out, plans=True, memory=memory, **sections)
    return sum(len(placement.state_on_drives) for placement in away)


def train_run(
    ranks: Any,
    *,
    root: str,
    out: str,
    killed: list[int] | None = None,
    how: str = "SIGKILL",
    plans: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    **sections: Any,
) -> str:
    """Train, or go on training, by rules of thumb in the place of a plan, which is what takes longest.

    Args:
        ranks: That train together.
        root: Directory of the model and the text.
        out: Run directory in it.
        killed: A rank, and the number of its collective, of whatever kind, before which it is killed.
        how: By which signal; `hang`: it is not killed, and waits for ever.
        plans: Memory is planned first, which takes longer than the run.
        callbacks: Of this rank.
        sections: Of the configuration.
    """
    if killed is not None and ranks.rank == killed[0]:
        _kill_at(ranks, killed[1], how)
    sections["train"] = {"grad_accumulation": 4, "steps": 6, "precision": "bf16"} | sections.get("train", {})
    sections = {"data": {"val_size": 0.02}, "eval": {"every": 3}, "checkpoint": {"every": 2}, **sections}
    config = make_config(Path(root), out, parallel={"shards": 4, "gather": "on"}, **sections)
    if plans:
        with searched_for_a_moment():
            return str(train(config, ranks=ranks, callbacks=callbacks, caller=Caller(counts=Path(root))))
    with patch("megatrain.train.run.plan_memory", return_value=None):
        return str(train(config, ranks=ranks, callbacks=callbacks))


def train_at_defaults(
    ranks: Any, *, root: str, out: str, likes: int, resume: str = "auto"
) -> tuple[int, int, int]:
    """Train with an open step, on a machine that is fastest with micro-batches of a size.

    Args:
        ranks: That train together.
        root: Directory of the model and the text.
        out: Run directory in it.
        likes: The size, in rows, near which it is fastest.
        resume: As of `train`.

    Returns:
        Tokens of a step, rows of a micro-batch, and micro-batches of a step, as the last checkpoint has them.
    """
    config = make_config(
        Path(root),
        out,
        train={"steps": 4, "micro_batch_size": "auto", "grad_accumulation": "auto"},
        parallel={"shards": 2},
        checkpoint={"every": 2},
        optim={"warmup_steps": 0},
    )

    def look(request: Request, _: object) -> SimpleNamespace:
        step_s = 1.0 + abs(request.batch.micro_batch_size - likes)
        return SimpleNamespace(choice=None, step=SimpleNamespace(step_s=step_s))

    with searched_for_a_moment(), patch("megatrain.train.planning.micro_batches.look", look):
        run = train(config, resume=resume, caller=Caller(counts=Path(root)), ranks=ranks)
    newest = newest_whole(run / "checkpoints", warn=lambda *_: None, digests=False)
    assert newest is not None
    saved = newest[1].meta["config"]["train"]
    return saved["tokens_per_step"], saved["micro_batch_size"], saved["grad_accumulation"]


def train_on_a_full_disk(ranks: Any, *, root: str, out: str) -> str:
    """Train as `train_run`, where no file of a checkpoint after the first one can be written."""
    files.system = FullAfterOne()
    return train_run(ranks, root=root, out=out)


class FullAfterOne(Watched):
    """A disk that has room for one checkpoint."""

    num_saves = 0

    def before(self, call: str, path: Path) -> None:
        if "checkpoints" in path.parts and call == "write" and self.num_saves:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.num_saves += target.parent.name == "checkpoints"


def _kill_at(ranks: Any, number: int, how: str) -> None:
    """Let a rank end, or hang, before one of its collectives."""
    collective, numbers = ranks._do, itertools.count(1)

    def counted(*arguments: Any) -> None:
        if next(numbers) == number:
            if how == "hang":
                threading.Event().wait()
            os.kill(os.getpid(), signal.Signals[how])
        collective(*arguments)

    ranks._do = counted


def train_with_a_jump(ranks: Any, *, root: str, out: str, faulty: list[int] | None = None) -> str:
    """Train as `train_run`, with a jump of the loss in the third step, which is run again.

    Args:
        ranks: As there.
        root: As there.
        out: As there.
        faulty: A rank, and the number of its calls of forward and backward in which a weight is wrong.
    """
    take = Spikes.take

    def told(self: Spikes, loss: float) -> float | None:
        take(self, loss)
        return loss / 2 if len(self.state()) == 3 else None

    with patch.object(Spikes, "take", told), pytest.MonkeyPatch.context() as context:
        if faulty is not None and ranks.rank == faulty[0]:
            Faulty(context, {faulty[1]})
        return train_run(ranks, root=root, out=out, train={"on_spike": "replay"})


def train_with_a_flip(ranks: Any, *, root: str, out: str, flips: int) -> str:
    """Train as `train_run`, all of the state watched, with a flip in what a rank has updated in step 5."""
    take = loop.train_step

    def flipping(run: Any) -> Any:
        row = take(run)
        if run.step == 5:
            run.engine.settle()
            if ranks.rank == flips:
                held = next(each for units in run.optimizer.memory_watch._held for each in units.values())
                held.planes[-1][1][0] ^= 1
        return row

    with patch.object(loop, "train_step", flipping):
        return train_run(ranks, root=root, out=out, memory={"watch": 1.0})
