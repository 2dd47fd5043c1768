"""Processes that train together: started by PyTorch's elastic launcher, that of torchrun, and joined here.

The launcher starts one process per rank, tells each in its environment who it is, and ends all when one has
ended. What we add is one exit code, the sentence of the rank that ended first, and that a run whose rank was
killed goes on from its newest checkpoint with fewer.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others."""


def run_ranks(
    num_ranks: int, arguments: Sequence[str], *, shards: int | None, say: Callable[[str], object]
) -> int:
    """Run `megatrain` with these arguments once per rank, and return one exit code.

    Where a rank was killed, the same command runs again, with the largest number of ranks that is left and
    shares out the step's runs: it goes on from the newest checkpoint, to the same bits.

    Args:
        num_ranks: How many: a power of two.
        arguments: Of the command line, without the number of ranks.
        shards: `parallel.shards`; None: as many as ranks.
        say: Is told what has happened.
    """
    again = [*arguments, f"parallel.shards={shards or num_ranks}"]
    with _signals_passed_on():
        while True:
            codes = _launch(num_ranks, arguments)
            killed = {rank: -code for rank, code in codes.items() if code < 0}
            if len(killed) < len(codes) or not codes:
                return max((code for code in codes.values() if code > 0), default=0)
            rank, number = next(iter(killed.items()))
            name = signal.Signals(number).name
            if num_ranks == 1:
                say(f"rank {rank} was killed ({name}); the same command goes on from the newest checkpoint")
                return 128 + number
            num_ranks //= 2
            say(f"rank {rank} was killed ({name}); going on from the newest checkpoint with {num_ranks}")
            arguments = again


def _launch(num_ranks: int, arguments: Sequence[str]) -> dict[int, int]:
    """Run all ranks to their end; return the exit codes of those that have failed, the first one first."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="localhost",
    )
    codes: dict[int, int] = {}

    def run() -> None:
        try:
            elastic_launch(config, sys.executable)("-m", "megatrain", *arguments)
        except ChildFailedError as error:
            first = error.get_first_failure()[0]
            failures = sorted(error.failures.items(), key=lambda item: item[0] != first)
            codes.update({rank: failure.exitcode for rank, failure in failures})

    # in a thread of its own the launcher leaves signals alone: a run that gets one finishes its step first
    thread = threading.Thread(target=run, name="launcher")
    thread.start()
    thread.join()
    return codes


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """Pass a signal on: the first rank finishes its step and saves, then tells the others to end."""

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in _children():
            os.kill(process, signal.SIGTERM)

    previous = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),  # a terminal tells the ranks itself
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    """List the processes that this one has started."""
    own = os.getpid()
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == own:
            found.append(int(stat.parent.name))
    return found


def join(environment: Mapping[str, str]) -> Ranks | None:
    """Join the processes that torchrun has started; None: this one was not, or it is alone.

    The cores of the machine are shared out, so that ranks do not wait for each other's threads.

    Raises:
        ConfigError: As `Ranks`.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    import torch.distributed as dist

    from megatrain.distributed.ranks import Ranks

    local_size = int(environment["LOCAL_WORLD_SIZE"])
    share_cores(int(environment["LOCAL_RANK"]), local_size)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return Ranks(TIMEOUT, local_size=local_size)


def share_cores(rank: int, num_ranks: int) -> None:
    """Keep this process to its part of the cores that it may use; where there are too few, to one of them."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        part = cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks]
        os.sched_setaffinity(0, part or [cores[rank % len(cores)]])
