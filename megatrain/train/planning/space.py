"""The room that a run needs in its directory, against the room that is there, before its first step.

A save needs room beside the checkpoints that are whole. So a run that keeps k checkpoints has k + 1 of them
while it saves, and at its end k of them and a copy of the model in `hf/`. Checkpoints and models that the run
has in its directory already count as room, since the same command writes them anew or removes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.load import find
from megatrain.config import Config
from megatrain.config.plan import Plan
from megatrain.config.sizes import binary, counted
from megatrain.config.types import steps_between
from megatrain.errors import CapacityError, os_errors
from megatrain.hardware.this_machine import existing_parent
from megatrain.plan.cost.saved_bytes import model_bytes
from megatrain.plan.search.request import Request
from megatrain.store.drives.places import STATE_NAME, bytes_taken
from megatrain.train.planning.save_interval import (
    COMMON_RATE,
    is_behind,
    is_timed,
    planned_facts,
    planned_interval,
    planned_wait,
    wear_interval,
)
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.metrics import format_duration

_ROW_BYTES = 2048
"""The bytes of a row of `metrics.jsonl`: 500 to 2,000 in real runs."""
_REPORT_BYTES = 5 << 20
"""The bytes of `report.html`, nearly all of them those of what draws its curves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The bytes that a run needs in its directory, and the bytes that it has there."""

    out: Path
    checkpoint_bytes: int
    model_bytes: int
    """The bytes of the model in `hf/`."""
    other_bytes: int
    """The bytes of logs, the report, an older model in `hf/`, and state on drives in the same file system."""
    have_bytes: int
    """The free bytes, and those of the checkpoints and the model that the run has there already."""
    keep_last: int | None
    """The checkpoints that are kept; None: all."""
    num_more: int
    """The checkpoints that are kept beside these: the best one."""
    num_saves: int | None
    """The checkpoints that there are and that the run will save; None: many, or not known."""
    interval_s: float | None
    """The seconds between checkpoints; None: there is one at the end only."""
    wait_s: float
    """The seconds for which the run waits for one."""

    @property
    def num_kept(self) -> int | None:
        """Return how many checkpoints are kept between two saves; None: as many as are saved."""
        return None if self.keep_last is None else self.keep_last + self.num_more

    @property
    def need_bytes(self) -> int | None:
        """Return the bytes that the settings ask for; None: they keep all, and nobody knows how many."""
        return None if self.num_kept is None and self.num_saves is None else self._bytes(self.num_kept)

    @property
    def least_bytes(self) -> int:
        """Return the bytes without which the run cannot save: a checkpoint that is whole, and the next."""
        return self._bytes(1)

    def _bytes(self, num_kept: int | None) -> int:
        most = self.num_saves
        kept = most if num_kept is None else num_kept if most is None else min(num_kept, most)
        assert kept is not None
        saving = kept if most == kept else kept + 1
        return self.other_bytes + max(
            saving * self.checkpoint_bytes, kept * self.checkpoint_bytes + self.model_bytes
        )

    @property
    def problem(self) -> str:
        """Return why the run is refused; empty if it is not."""
        if self.have_bytes >= self.least_bytes:
            return ""
        one = binary(self.checkpoint_bytes)
        if self.num_saves == 1:
            what = f"a checkpoint of {one} and the model in hf/, of {binary(self.model_bytes)}"
        else:
            what = f"two checkpoints of {one}, since one stays whole while the next is written"
        other = f", and {binary(self.other_bytes)} for all else" if self.other_bytes >= self._share else ""
        return (
            f"the file system of {self.out} has room for {binary(self.have_bytes)}, but the run needs "
            f"{binary(self.least_bytes)} there: {what}{other}. Make room there, or name another directory "
            "with out (--out)"
        )

    @property
    def warning(self) -> str:
        """Return what the settings keep beyond the room, with the way out; empty if there is room."""
        need = self.need_bytes
        if self.problem or (need is not None and self.have_bytes >= need):
            return ""
        one, have = binary(self.checkpoint_bytes), binary(self.have_bytes)
        fits = self._fitting
        if need is None:
            return (
                f"checkpoint.keep_last=null keeps every checkpoint, each of {one}, and the file system of "
                f"{self.out} has room for {have}, so saves may fail: set checkpoint.keep_last to {fits} or "
                "less, make room there, or name another directory with out (--out)"
            )
        kept = "every checkpoint" if self.keep_last is None else f"checkpoint.keep_last={self.keep_last}"
        less = fits - self.num_more
        fewer = f"set checkpoint.keep_last to {less} or less" if less >= 1 else "set eval.keep_best=false"
        return (
            f"the file system of {self.out} has room for {have}, but {kept} takes {binary(need)} while a "
            f"checkpoint of {one} is saved, so saves will fail: {fewer}, make room there, or name another "
            "directory with out (--out)"
        )

    @property
    def _fitting(self) -> int:
        """The number of checkpoints that may be kept."""
        room = self.have_bytes - self.other_bytes
        return max(1, room // max(1, self.checkpoint_bytes) - 1)

    @property
    def _share(self) -> int:
        return self.least_bytes // 100

    @property
    def text(self) -> str:
        """Return the figures in a few words."""
        need = self.need_bytes
        needs = "more with every save" if need is None else f"{binary(need)} with what is kept"
        kept = "all are kept" if self.keep_last is None else f"{counted(self.keep_last, 'checkpoint')} kept"
        return f"{needs} ({kept}, and one that is written), of {binary(self.have_bytes)} in {self.out}"

    @property
    def risk(self) -> str:
        """Return how often the run saves, and how much work is at risk meanwhile."""
        if self.interval_s is None:
            return "at the end only: until then all work is at risk (checkpoint.every)"
        every, wait = format_duration(self.interval_s), format_duration(self.wait_s)
        return f"about every {every}, which is the work at risk; the run waits {wait} for each checkpoint"

    def json(self) -> Mapping[str, Any]:
        """Return the figures as plain values."""
        return {
            "checkpoint_bytes": self.checkpoint_bytes,
            "interval_s": self.interval_s,
            "wait_s": self.wait_s,
            "need_bytes": self.need_bytes,
            "least_bytes": self.least_bytes,
            "have_bytes": self.have_bytes,
            "problem": self.problem or None,
            "warning": self.warning or None,
        }


def space_of(
    config: Config,
    request: Request,
    plan: Plan,
    *,
    num_steps: int | None,
    steps_per_epoch: int | None,
    done: int = 0,
) -> Space | None:
    """Return the room that a run needs in `out` and has there; None: the file system does not say.

    Args:
        config: The settings of the run.
        request: The request for its plan, which has the counts of its model.
        plan: The plan.
        num_steps: The number of steps of the whole run; None: not known.
        steps_per_epoch: The number of steps of one pass over the data; None: not known.
        done: The number of steps that an earlier process has done.

    Raises:
        OutputError: The directory cannot be looked at.
    """
    directory = RunDirectory(Path(config.out))
    step_s, drive_bytes = plan.step_s, plan.tier_bytes("nvme")
    with os_errors("look at the run directory", directory.path):
        where = existing_parent(directory.path)
        found = os.statvfs(where)
        if not found.f_blocks:  # as some network file systems have it
            return None
        there = len(find(directory.checkpoints)) if directory.checkpoints.is_dir() else 0
        facts = planned_facts(request, plan)
        nbytes = facts["nbytes"]
        wait_s = nbytes / COMMON_RATE
        if is_behind(config):
            wait_s = planned_wait(step_s=step_s, **facts)
        interval_s = planned_interval(
            config.checkpoint.every,
            steps_per_epoch or num_steps or 1,
            step_s=step_s,
            wait_s=wait_s,
            wear_s=wear_interval(
                plan,
                nbytes=nbytes,
                num_steps=None if num_steps is None else num_steps - done,
                rated_bytes=rated_bytes(config, request),
            ),
        )
        saves = _num_saves(config, num_steps, steps_per_epoch, done, step_s, interval_s)
        rows = 0 if num_steps is None else num_steps // config.log.every
        other = rows * _ROW_BYTES + _bytes_in(directory.model) + _REPORT_BYTES * config.log.report
        other += _state_bytes(config, drive_bytes, os.stat(where).st_dev)
        return Space(
            out=directory.path,
            checkpoint_bytes=nbytes,
            model_bytes=model_bytes(request.anatomy),
            other_bytes=other,
            have_bytes=found.f_bavail * found.f_frsize
            + _bytes_in(directory.checkpoints)
            + _bytes_in(directory.model),
            keep_last=config.checkpoint.keep_last,
            num_more=int(_keeps_best(config)),
            num_saves=None if saves is None else there + saves,
            interval_s=interval_s,
            wait_s=wait_s,
        )


def rated_bytes(config: Config, request: Request) -> float | None:
    """Return the rated endurance of the drives that a run writes to, in bytes; None: not known."""
    drives, own = request.spec.drives, config.hardware.rated_bytes_written
    if own is not None:
        return float(own)
    return None if drives is None else drives.rated_bytes_written


def require_space(space: Space | None) -> str:
    """Return what to warn of before a run begins; empty if there is nothing.

    Raises:
        CapacityError: The run cannot save.
    """
    if space is not None and space.problem:
        raise CapacityError(space.problem)
    return "" if space is None else space.warning


def _num_saves(
    config: Config,
    num_steps: int | None,
    steps_per_epoch: int | None,
    done: int,
    step_s: float,
    interval_s: float | None,
) -> int | None:
    """Return how often the rest of a run saves, the end included; None: often, or not known."""
    every = config.checkpoint.every
    if _keeps_best(config) or num_steps is None:
        return None
    if is_timed(every):
        assert interval_s is not None
        return 1 + int((num_steps - done) * step_s / interval_s)
    if isinstance(every, str) and steps_per_epoch is None:
        return None
    each = steps_between(every, steps_per_epoch or 0)
    if each is None:
        return 1
    return -(-num_steps // each) - done // each


def _keeps_best(config: Config) -> bool:
    is_evaluated = config.eval.every is not None or config.eval.at_end
    return config.eval.keep_best and is_evaluated and bool(config.data.val_size or config.data.eval_path)


def _state_bytes(config: Config, drive_bytes: int, device: int) -> int:
    """Return the bytes that state on drives will still take on the file system of a number."""
    drives = [Path(each) for each in config.memory.drives]
    shares = [
        max(0, drive_bytes // len(drives) - bytes_taken(each / STATE_NAME))
        for each in drives
        if os.stat(existing_parent(each)).st_dev == device
    ]
    return sum(shares)


def _bytes_in(directory: Path) -> int:
    """Return the bytes that a directory takes on its file system; what goes meanwhile counts as gone."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
