"""A process joins those that it trains with, as a launcher has told it in the environment.

They meet in a store first, and tell each other there what decides how they go on: their versions, addresses,
CPUs and devices. So they find the interface by which they reach each other, share out what a node has, and
say what is wrong in one sentence, before any of them connects to another one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatrain.distributed.alone import ALONE, Alone
from megatrain.distributed.guard import Guard
from megatrain.distributed.idle import watch_idly
from megatrain.distributed.meeting import Met, backend_of, meet, share_cores, take_device, this_process
from megatrain.distributed.network import VARIABLES, is_own, name_interface, own_address
from megatrain.distributed.processes import OF_RANK, tell_launcher
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

_OF_TORCHRUN = (*OF_RANK, "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says in the environment, beside `WORLD_SIZE`."""

_MORE_S = 5.0
"""How much longer than it was told torch may take, before the process is ended."""


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
            num_processes: The number of processes on all nodes.
            num_local: The number of processes on each node.
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
    environment: MutableMapping[str, str],
    timeout_s: float,
    shards: int | None,
    say: Callable[[str], object],
    *,
    device: str = "cpu",
) -> Ranks | Alone:
    """Join the processes that torchrun has started; `Alone`: this one was not, or it trains by itself.

    The cores of the machine are shared out, so that ranks do not wait for each other's threads. Its
    accelerators are too, one for each rank, which becomes the current one. A process that is not needed stays
    until the others have ended: its node can take part after a restart.

    Args:
        environment: The environment of this process, in which torchrun says who it is; interfaces are named
            in it.
        timeout_s: The time limit, as in `Ranks`; joining takes no longer either.
        shards: The number of shards of a row, as in `Places.of`.
        say: The function that is told once which processes are not needed.
        device: The device on which the run computes, by `train.device`.

    Raises:
        ConfigError: `Places.of`, `meet` or `Ranks` refuses, there are too few accelerators, torchrun has not
            started this process though `WORLD_SIZE` is set, or the processes do not reach each other.
        RankError: This process was not needed, and the others were lost.
        SystemExit: It was not needed, and the others have ended.
    """
    num_processes = int(environment.get("WORLD_SIZE", "1"))
    if num_processes == 1:
        return ALONE
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
        return ALONE
    known = {"rank": number, "world_size": num_processes}
    if rank is not None:
        known = {"rank": rank, "world_size": places.size}
    timeout, wait = timedelta(seconds=timeout_s), f"{timeout_s:g} s (parallel.timeout)"
    with _within(2 * timeout_s + _MORE_S, unmet(environment, "nobody answers", wait)):
        try:
            store, *_ = next(dist.rendezvous("env://", timeout=timeout, **known))
        except (RuntimeError, ValueError) as error:  # the latter of a port that is no number
            raise ConfigError(unmet(environment, first_line(error), wait)) from error
    if rank is None:
        watch_idly(store, timeout_s)
        raise SystemExit(0)
    with _within(2 * timeout_s + _MORE_S, unmet(environment, "nobody answers any more", wait)):
        address = own_address(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
        mine = this_process(device, address)
        met = meet(store, mine, rank, places.size, places.local_size)
        name_way(environment, met)
        share_cores(met)
        backend = backend_of(take_device(met))
    with _within(timeout_s + _MORE_S, unreached(environment, "they do not answer")):
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=places.size, timeout=timeout)
        except RuntimeError as error:
            raise ConfigError(unreached(environment, first_line(error))) from error
    return Ranks(store, timeout_s, local_size=places.local_size)


def name_way(environment: MutableMapping[str, str], met: Met) -> None:
    """Name the interface by which this machine reaches the others, if it can be found."""
    address = met.own.address
    if met.far is not None and (address is None or is_own(address)):
        # here the first host's name means the machine itself: the way to another node is what others need
        far = met.far.address
        address = None if far is None or is_own(far) else own_address(far, 1)
    if address is not None:
        name_interface(environment, address)


def unmet(environment: Mapping[str, str], reason: str, wait: str) -> str:
    """Say that a process cannot meet the others, and what to do; `wait`: how long it has."""
    host = environment["MASTER_ADDR"]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        reason = f"{host} has no address here: {error.strerror}"
    return (
        f"rank {environment['RANK']} on {socket.gethostname()} does not meet the others at "
        f"{host}:{environment['MASTER_PORT']} ({reason}); give all nodes the same address and port, free on "
        f"the first one, and start them within {wait}"
    )


def unreached(environment: Mapping[str, str], reason: str) -> str:
    """Say that a process cannot connect to the others, by which interface, and what to do."""
    name = environment.get(VARIABLES[0])
    way = "the address of its host's name" if name is None else f"interface {name}"
    return (
        f"rank {environment['RANK']} on {socket.gethostname()} does not reach the others by {way} "
        f"({reason}); set {VARIABLES[0]} on each node to the interface by which nodes reach each other "
        "(`ip address` lists them), and let no firewall be between them"
    )


def first_line(error: BaseException) -> str:
    """Return what an error of torch says, without its stack."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextmanager
def _within(seconds: float, sentence: str) -> Iterator[None]:
    """End the process with a sentence, should torch take longer inside; it may wait for ever.

    What its C++ says meanwhile, the stack of each try that has failed, is not shown: an error has the reason.
    """
    screen, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)

    def see(silent_s: float) -> None:
        if silent_s > seconds:
            os.write(screen, f"error: {sentence}\n".encode())
            tell_launcher(sentence)
            os._exit(ConfigError.exit_code)

    guard = Guard(seconds, see)
    guard.start()
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        guard.close()
        os.close(screen)
        os.close(nowhere)
