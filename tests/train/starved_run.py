"""A run that gets no more memory from one moment on: `python -m tests.train.starved_run FILE MOMENT`.

At the moment the limit of the address space falls to half of what is in use, all that the process has free is
used up, and then memory is asked for.
"""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain import cli
from megatrain.data.loader import PackedLoader
from megatrain.stream import optimizer
from megatrain.stream.engine import Engine
from megatrain.train import loop, step
from megatrain.train.run import Run

STEP = 4
"""The number of whole steps at the moment."""
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "step": (step, "count_targets", 0),
    "loader": (PackedLoader, "_micro_batch", 1),
    "rows": (PackedLoader, "_next_row", 3),
    "first layer": (torch.nn.functional, "silu", 0),
    "last layer": (torch.nn.functional, "silu", 2),
    "second micro-batch": (torch.nn.functional, "silu", 4),
    "backward": (torch.autograd, "backward", 0),
    "forward": (Engine, "forward_backward", 0),
    "norm": (optimizer, "global_norm", 0),
    "update": (Engine, "_check_step", 0),
}
"""The moments: a function of the step, and how often it is called before."""


ARENAS = 64
HELD: list[np.ndarray[Any, Any]] = []


def use_up() -> None:
    """Allocate all that can be, down to pieces of 2 KiB."""
    gc.collect()
    for size in (8 << 20, 1 << 20, 128 << 10, 16 << 10, 2 << 10):
        failed = 0
        while failed < ARENAS:  # malloc looks into another one each time
            try:
                HELD.append(np.empty(size, np.uint8))
                failed = 0
            except MemoryError:
                failed += 1


def set_trap(owner: Any, name: str, number: int) -> None:
    """Take memory away at the call of that number in the step."""
    function, steps, found = getattr(owner, name), loop.train_step, {"run": None, "left": number}

    def trapped(*args: Any, **given: Any) -> Any:
        run: Any = found["run"]
        if run is not None and run.step == STEP:
            found["left"] -= 1  # type: ignore[operator]
            if found["left"] == -1:
                in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (in_use // 2, resource.RLIM_INFINITY))
                use_up()
                torch.empty(1 << 20, dtype=torch.uint8)
        return function(*args, **given)

    def stepped(run: Run) -> Any:
        found["run"] = run  # type: ignore[assignment]
        return steps(run)

    setattr(owner, name, trapped)
    loop.train_step = stepped


if __name__ == "__main__":
    set_trap(*MOMENTS[sys.argv[2]])
    cli.main(["train", sys.argv[1]])
