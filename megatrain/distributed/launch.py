"""Processes that train together: started by PyTorch's elastic launcher, that of torchrun, and joined here.

The launcher starts one process per rank, tells each in its environment who it is, and ends all when one has
ended. What we add is one exit code, what each rank ended with, that a signal to the launcher ends ranks as it
would end one, and that a run one of whose ranks was killed, stopped or hung goes on from its newest
checkpoint with fewer.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from uuid import uuid4

from megatrain.distributed.idle import watch_idly
from megatrain.distributed.processes import how_ended, status_of
from megatrain.distributed.signals import stop_signals
from megatrain.errors import ConfigError, RankError, TornStateError
from megatrain.hardware.accelerators import VENDORS, check_count

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says in the environment, beside `WORLD_SIZE`."""

_LOOK_S = 0.1
"""How often the launcher looks for ranks to pass a signal on to."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How ranks ended that did not do so as they should; the first one is first."""

    codes: dict[int, int]
    """Their exit codes; negative: the signal that killed it."""
    sentences: dict[int, str]
    """What those said that could."""
    signal: int | None = None
    """That the launcher got, and passed on to them."""

    @property
    def own_code(self) -> int | None:
        """Exit code of the first rank that ended neither by a signal nor because of another rank, if any."""
        of_others = {RankError.exit_code, TornStateError.exit_code}
        return next((code for code in self.codes.values() if code > 0 and code not in of_others), None)

    @property
    def reason(self) -> str | None:
        """Why fewer ranks may go on; None: they would end in the same way, or were asked to end."""
        if self.own_code is not None or self.signal is not None:
            return None
        for rank, code in self.codes.items():
            if code < 0:
                return f"rank {rank} {how_ended(code)}"
        if all(code == RankError.exit_code for code in self.codes.values()):
            return next(iter(self.sentences.values()), "a rank was stopped, hung or lost")
        return None

    @property
    def exit_code(self) -> int:
        """Of the command: that of the first rank that has one of its own."""
        if not self.codes:
            return 0
        if self.own_code is not None:
            return self.own_code
        if self.signal is not None:
            return 128 + self.signal
        code = max(self.codes.values(), key=lambda code: code > 0)
        return code if code > 0 else 128 - code


def run_ranks(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    least: int = 1,
    again: Callable[[], Sequence[str]],
    tell: Callable[[Ended, int], object],
) -> int:
    """Run `megatrain` with these arguments once per rank, and return one exit code.

    Where a rank was killed, stopped or hung, the same run goes on from its newest checkpoint, to the same
    bits, with the largest number of ranks that is left and shares out the step's runs. The first signal of
    `stop_signals` lets the ranks finish their step and save, or ends them if they do not train yet; a second
    one ends them at once. After either nothing goes on.

    Args:
        num_ranks: How many: a power of two.
        arguments: Of the command line, without the number of ranks.
        least: So many take part in every micro-batch: fewer cannot run.
        again: Returns the arguments with which the run goes on.
        tell: Is told how ranks have ended, and how many go on: 0, if none do.
    """
    with _stopping() as stop:
        while True:
            ended = replace(_launch(num_ranks, arguments, stop), signal=stop.number)
            if not ended.codes:
                return 0
            goes_on = num_ranks > least and ended.reason is not None
            num_ranks = num_ranks // 2 if goes_on else 0
            tell(ended, num_ranks)
            if not goes_on:
                return ended.exit_code
            arguments = again()


def _launch(num_ranks: int, arguments: Sequence[str], stop: _Stop) -> Ended:
    """Run all ranks to their end, or until they are stopped."""
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
                if "timestamp" in failure.error_file_data:  # `tell_launcher` has written it
                    ended.sentences[rank] = failure.message

    # in a thread of its own the launcher leaves signals alone: a run that gets one finishes its step first
    thread = threading.Thread(target=run, name="launcher")
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        stop.pass_on()
    return ended


class _Stop:
    """A signal to the launcher, which alone gets what a terminal sends: ranks have sessions of their own."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The last one; None: there was none."""
        self._is_second = False
        self._told: set[int] = set()

    def note(self, number: int, _: FrameType | None) -> None:
        """Take a signal; that a terminal is closed may be said twice, and means it once."""
        if self.number is not None and number != signal.SIGHUP:
            self._is_second = True
        self.number = number

    def pass_on(self) -> None:
        """Tell the ranks that do not know of it, some of which may only have been started since.

        They are told with SIGTERM, which ends those that do not train yet without a word. The first rank
        finishes its step and saves, then tells the others to end.
        """
        if self.number is None:
            return
        for process in _children():
            if self._is_second or process not in self._told:
                self._told.add(process)
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process, signal.SIGKILL if self._is_second else signal.SIGTERM)


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """Take the signals that ask this process to end."""
    stop = _Stop()
    previous = {number: signal.signal(number, stop.note) for number in stop_signals()}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    """List the processes that this one has started."""
    numbers = [int(place.name) for place in Path("/proc").glob("[0-9]*")]
    found = {number: status_of(number) for number in numbers}
    return [number for number, status in found.items() if status and int(status[1]) == os.getpid()]


@dataclass(frozen=True, slots=True)
class Places:
    """Who trains of the processes that are started: a power of two of nodes, and of ranks on each."""

    num_nodes: int
    local_size: int
    """Ranks of each node."""

    @classmethod
    def of(cls, num_processes: int, num_local: int, shards: int | None) -> Places:
        """Take as many as can share out a step's runs, those of one node first.

        Args:
            num_processes: On all nodes.
            num_local: On each.
            shards: `parallel.shards`; None: as many as ranks.

        Raises:
            ConfigError: Nodes have different numbers.
        """
        if num_processes % num_local:
            raise ConfigError(
                f"a node has {num_local} of {num_processes} ranks, and others have another number; start as "
                "many on each"
            )
        local_size = _power_of_two(min(num_local, shards or num_local))
        num_nodes = num_processes // num_local
        return cls(_power_of_two(min(num_nodes, (shards or num_processes) // local_size)), local_size)

    @property
    def size(self) -> int:
        """Ranks that train."""
        return self.num_nodes * self.local_size

    def rank(self, node: int, local_rank: int) -> int | None:
        """Return the rank of a process; None: it is not needed."""
        if node >= self.num_nodes or local_rank >= self.local_size:
            return None
        return node * self.local_size + local_rank


def _power_of_two(most: int) -> int:
    return 1 << (most.bit_length() - 1)


def join(
    environment: Mapping[str, str],
    timeout_s: float,
    shards: int | None,
    say: Callable[[str], object],
    *,
    device: str = "cpu",
) -> Ranks | None:
    """Join the processes that torchrun has started; None: this one was not, or it is alone.

    The cores of the machine are shared out, so that ranks do not wait for each other's threads. Its
    accelerators are too, one for each rank, which becomes the current one. A process that is not needed stays
    until the others have ended: its node can take part after a restart.

    Args:
        environment: Of this process, in which torchrun has told it who it is.
        timeout_s: As in `Ranks`.
        shards: As in `Places.of`.
        say: Is told once which processes are not needed.
        device: Where the run computes, by `train.device`.

    Raises:
        ConfigError: As `Places.of` and `Ranks`, there are too few accelerators, torchrun has not started this
            process though `WORLD_SIZE` is set, or the processes do not meet.
        RankError: This process was not needed, and the others were lost.
        SystemExit: It was not needed, and the others have ended.
    """
    num_processes = int(environment.get("WORLD_SIZE", "1"))
    if num_processes == 1:
        return None
    missing = [name for name in _OF_TORCHRUN if name not in environment]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {num_processes} in the environment, without {', '.join(missing)}; start ranks "
            "with torchrun or --ranks, or unset WORLD_SIZE to train alone"
        )
    import torch.distributed as dist

    from megatrain.distributed.ranks import Ranks

    num_local, local_rank = int(environment["LOCAL_WORLD_SIZE"]), int(environment["LOCAL_RANK"])
    places = Places.of(num_processes, num_local, shards)
    number = int(environment["RANK"])
    rank = places.rank(number // num_local, local_rank)
    if rank == 0 and places.size < num_processes:
        why = "a power of two" if shards is None else f"which parallel.shards={shards} can be shared out to"
        say(f"{places.size} of {num_processes} ranks train, {why}; the others wait for their end")
    if places.size == 1:
        if rank is None:
            raise SystemExit(0)
        return None
    timeout = timedelta(seconds=timeout_s)
    wanted = (
        {"rank": number, "world_size": num_processes}
        if rank is None
        else {"rank": rank, "world_size": places.size}
    )
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timeout, **wanted))
    except dist.DistError as error:
        raise ConfigError(
            f"rank {number} does not meet the others at {environment['MASTER_ADDR']}:"
            f"{environment['MASTER_PORT']} ({str(error).splitlines()[0]}); give all nodes the same "
            "address and port, free on the first one, and start them within "
            f"{timeout_s:g} s (parallel.timeout)"
        ) from error
    if rank is None:
        watch_idly(store, timeout_s)
        raise SystemExit(0)
    share_cores(local_rank, places.local_size)
    backend = own_backend(device, local_rank, places.local_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=places.size, timeout=timeout)
    return Ranks(store, timeout_s, local_size=places.local_size)


def own_backend(device: str, rank: int, num_ranks: int) -> str:
    """Make this rank's accelerator the current one; return the backend for its tensors and the host's.

    Args:
        device: As in `join`.
        rank: Of those on this computer.
        num_ranks: On this computer.

    Raises:
        ConfigError: There are too few accelerators.
    """
    import torch

    kind = check_count(device, num_ranks)
    if kind is None:
        return "cpu:gloo"
    torch.accelerator.set_device_index(rank)
    collectives = VENDORS[kind].collectives
    return "cpu:gloo" if collectives is None else f"cpu:gloo,{kind}:{collectives}"


def share_cores(rank: int, num_ranks: int) -> None:
    """Keep this process to its part of the cores that it may use; where there are too few, to one of them."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        part = cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks]
        os.sched_setaffinity(0, part or [cores[rank % len(cores)]])
