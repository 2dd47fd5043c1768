"""Trains a run in which something takes for ever, or long: `python -m tests.train.hung_run ROOT WHAT`.

`copy` hangs a copy to the device in the fifth step, `update` an update in the middle of
those of the fourth, which the save of that step waits for; `immediate` is `copy` with such updates, and
`resident` with layers whose newest state is on the device. `evaluation` hangs a copy in the evaluation after
the third step, `write` a write of the checkpoint of the fourth, which the one of the sixth waits for, `last`
one of the last checkpoint, and `blocking` a write that the run itself does; `row` hangs the write of the
fourth step's row of metrics; `error` is `write` with an error
in the fifth step, and `ctrl_c` is `write` without `train.hang_after`, which prints that it hangs.
With `slow`, nothing hangs: callbacks, data, an evaluation and saves take longer than `train.hang_after`, and
the process is stopped in the middle of a step for as long.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from megatrain import files
from megatrain.config import Config
from megatrain.data.loader import PackedLoader
from megatrain.plan.program.kinds import Lane
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import EmulatedLanes
from megatrain.train import hang as hang_end
from megatrain.train import loop
from megatrain.train.evaluate.evaluator import Evaluator
from megatrain.train.planning.elastic import Elastic
from tests.disks import WatchedWrites
from tests.train.project import make_config

SLOW_S = 1.3


def config_of(root: Path, out: str, *, hang_after: float | None, **sections: dict[str, Any]) -> Config:
    """Describe the run; nothing of it depends on `hang_after`."""
    options: dict[str, dict[str, Any]] = {
        "train": {"steps": 7, "device": "emulated", "hang_after": hang_after},
        "data": {"val_size": 0.05},
        "eval": {"every": 3, "keep_best": False},
        "checkpoint": {"every": None},
        "log": {"report": False},
    }
    for name, values in sections.items():
        options[name] = options.get(name, {}) | values
    return make_config(root, out, **options)


class _Steps:
    """Knows which step is going on, counted from 1."""

    def __init__(self) -> None:
        self.run: Any = None
        step_of = loop.train_step

        def stepped(run: Any) -> Any:
            self.run = run
            return step_of(run)

        loop.train_step = stepped

    @property
    def step(self) -> int:
        return 0 if self.run is None else int(self.run.step) + 1


def never_comes_back() -> None:
    """Say so, and hang."""
    os.write(1, b"hangs\n")  # other threads do, too
    time.sleep(3600)


def hang(lane: Lane, step: int, *, label: str = "", after: int = 0, evaluating: bool = False) -> None:
    """Let an operation of a lane hang in a step, the one after so many others of its label.

    Where it is to be in an evaluation, the step is the one that would come next.
    """
    steps, submit, count = _Steps(), EmulatedLanes._submit, 0
    evaluate, is_evaluating = Evaluator.evaluate, False

    def evaluated(*args: Any, **given: Any) -> Any:
        nonlocal is_evaluating
        is_evaluating = True
        torch.rand(3)  # what an evaluation draws is no training's
        found = evaluate(*args, **given)
        is_evaluating = False
        return found

    Evaluator.evaluate = evaluated  # type: ignore[method-assign]

    def submitted(lanes: Any, own: Lane, function: Callable[[], object], work: float, found: object) -> Any:
        nonlocal count
        is_it = own is lane and steps.step == step and str(found).startswith(label)
        is_it = is_it and is_evaluating is evaluating
        count += is_it
        if is_it and count == after + 1:
            function = never_comes_back
        return submit(lanes, own, function, work, found)

    EmulatedLanes._submit = submitted  # type: ignore[method-assign,assignment]


def fail(step: int) -> None:
    """Let a step fail."""
    step_of = loop.train_step

    def failing(run: Any) -> Any:
        if run.step + 1 == step:
            raise RuntimeError("a wire is loose")
        return step_of(run)

    loop.train_step = failing


class HungDisk(WatchedWrites):
    """A disk on which one write never ends."""

    def __init__(self, name: str, after: int = 0) -> None:
        """Hang in a write of what has this in its path, the one after so many others."""
        self._name, self._left = name, after

    def before_write(self, path: str, num_bytes: int) -> None:
        """Hang, or not."""
        if self._name in path:
            self._left -= 1
            if self._left < 0:
                never_comes_back()


class Slow(TrainerCallback):
    """Sleeps at two moments of the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(SLOW_S if state.global_step == 2 else 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(SLOW_S if state.global_step == 2 else 0)


class SlowDisk(files.FileCalls):
    """A disk on which each write takes half of what would be a hang."""

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Sleep, and write."""
        time.sleep(0.5)
        return super().write_at(descriptor, data, offset)


def be_slow() -> None:
    """Slow down all that is no step, and stop the process in the fifth one."""
    steps = _Steps()
    forward, load, evaluate = Engine.forward_backward, PackedLoader.__next__, Evaluator.evaluate

    def stopped(*args: Any, **given: Any) -> Any:
        if steps.step == 5:
            process = os.getpid()
            subprocess.Popen(["/bin/sh", "-c", f"sleep {SLOW_S}; kill -CONT {process}"])
            os.kill(process, signal.SIGSTOP)
        return forward(*args, **given)

    def loaded(loader: Any) -> Any:
        time.sleep(SLOW_S if steps.step == 4 else 0)
        return load(loader)

    def evaluated(*args: Any, **given: Any) -> Any:
        layers = steps.run.engine.model.get_decoder().layers
        hooks = [layer.register_forward_hook(lambda *_: time.sleep(SLOW_S / 3)) for layer in layers]
        try:
            return evaluate(*args, **given)
        finally:
            for hook in hooks:
                hook.remove()

    Engine.forward_backward = stopped  # type: ignore[method-assign]
    PackedLoader.__next__ = loaded  # type: ignore[method-assign,assignment]
    files.system = SlowDisk()
    Evaluator.evaluate = evaluated  # type: ignore[method-assign]


def main(root: Path, what: str) -> None:
    """Train."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    # by what this machine does meanwhile, a new plan could leave state on the device alone, or other copies
    Elastic.after_step = lambda self, report: ""  # type: ignore[method-assign]
    sections: dict[str, dict[str, Any]] = {}
    if what == "copy":
        hang(Lane.FETCH, 5, after=2)
    elif what == "update":
        hang(Lane.HOST, 4, label="update", after=1)
        sections["checkpoint"] = {"every": 2}
    elif what == "immediate":
        hang(Lane.FETCH, 5, after=2)
        sections["optim"] = {"updates": "immediate", "max_grad_norm": None}
        sections["checkpoint"] = {"every": 2}
    elif what == "resident":
        hang(Lane.FETCH, 5, after=2)
        sections["memory"] = {"resident_blocks": 1}
        sections["checkpoint"] = {"every": 3}
    elif what == "evaluation":
        hang(Lane.FETCH, 4, after=1, evaluating=True)
    elif what in ("write", "last", "blocking", "error", "ctrl_c"):
        hang_end.LEAST_S = 2.0  # the time in which it tries to save
        files.system = HungDisk("step-00000007" if what == "last" else "step-00000004")
        if what == "error":
            fail(5)
        if what == "ctrl_c":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # one in the background inherits none
        sections["checkpoint"] = {"every": 2, "background": what != "blocking"}
    elif what == "row":
        files.system = HungDisk("metrics.jsonl", after=3)
    else:
        assert what == "slow", what
        be_slow()
    hang_after = {"slow": 1.0, "ctrl_c": None}.get(what, 2.0)
    config = config_of(root, "run", hang_after=hang_after, **sections)
    loop.train(config, callbacks=[Slow()] if what == "slow" else [])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
