"""Processes that train together: started by PyTorch's elastic launcher, that of torchrun, and joined here.

The launcher starts one process per rank, tells each in its environment who it is, and ends all when one has
ended. What we add is one exit code, what each rank ended with, and that a run one of whose ranks was killed,
stopped or hung goes on from its newest checkpoint with fewer.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from uuid import uuid4

from megatrain.errors import RankError, TornStateError

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Ended:
    """How ranks ended that did not do so as they should; the first one is first."""

    codes: dict[int, int]
    """Their exit codes; negative: the signal that killed it."""
    sentences: dict[int, str]
    """What those said that could."""

    @property
    def reason(self) -> str | None:
        """Why fewer ranks may go on; None: they would end in the same way."""
        for rank, code in self.codes.items():
            if code < 0:
                return f"rank {rank} was killed ({signal.Signals(-code).name})"
        if all(code == RankError.exit_code for code in self.codes.values()):
            return next(iter(self.sentences.values()), "a rank was stopped, hung or lost")
        return None

    @property
    def exit_code(self) -> int:
        """Of the command: that of the first rank that has one of its own."""
        of_others = {RankError.exit_code, TornStateError.exit_code}
        ordered = sorted(self.codes.values(), key=lambda code: (code < 0, code in of_others))
        return 0 if not ordered else ordered[0] if ordered[0] > 0 else 128 - ordered[0]


def run_ranks(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    again: Callable[[], Sequence[str]],
    tell: Callable[[Ended, int], object],
) -> int:
    """Run `megatrain` with these arguments once per rank, and return one exit code.

    Where a rank was killed, stopped or hung, the same run goes on from its newest checkpoint, to the same
    bits, with the largest number of ranks that is left and shares out the step's runs.

    Args:
        num_ranks: How many: a power of two.
        arguments: Of the command line, without the number of ranks.
        again: Returns the arguments with which the run goes on.
        tell: Is told how ranks have ended, and how many go on: 0, if none do.
    """
    with _signals_passed_on():
        while True:
            ended = _launch(num_ranks, arguments)
            if not ended.codes:
                return 0
            own = set(ended.codes.values()) - {RankError.exit_code, TornStateError.exit_code}
            goes_on = num_ranks > 1 and ended.reason is not None and all(code < 0 for code in own)
            num_ranks = num_ranks // 2 if goes_on else 0
            tell(ended, num_ranks)
            if not goes_on:
                return ended.exit_code
            arguments = again()


def _launch(num_ranks: int, arguments: Sequence[str]) -> Ended:
    """Run all ranks to their end."""
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
    ended = Ended({}, {})

    def run() -> None:
        try:
            elastic_launch(config, sys.executable)("-m", "megatrain", *arguments)
        except ChildFailedError as error:
            first = error.get_first_failure()[0]
            failures = sorted(error.failures.items(), key=lambda item: item[0] != first)
            for rank, failure in failures:
                ended.codes[rank] = failure.exitcode
                if isinstance(failure.message, str) and "message" in failure.error_file_data:
                    ended.sentences[rank] = failure.message

    # in a thread of its own the launcher leaves signals alone: a run that gets one finishes its step first
    thread = threading.Thread(target=run, name="launcher")
    thread.start()
    thread.join()
    return ended


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


def join(environment: Mapping[str, str], timeout_s: float) -> Ranks | None:
    """Join the processes that torchrun has started; None: this one was not, or it is alone.

    The cores of the machine are shared out, so that ranks do not wait for each other's threads.

    Args:
        environment: Of this process, in which torchrun has told it who it is.
        timeout_s: As in `Ranks`.

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
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    return Ranks(store, timeout_s, local_size=local_size)


def share_cores(rank: int, num_ranks: int) -> None:
    """Keep this process to its part of the cores that it may use; where there are too few, to one of them."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        part = cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks]
        os.sched_setaffinity(0, part or [cores[rank % len(cores)]])
