"""Trainers of several ranks: each goes through the whole run as if it were alone, and computes its part.

A launcher has started the same script several times, and `TrainingArguments` have joined the processes. Once
a trainer is made, accelerate is told that each process is alone, by its own number. So every rank reads all
batches in their order and logs as a single process does, and only the first one writes. Each rank runs its
own of a step's micro-batches, through an engine that knows the others, and they tell each other their
results.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from traceback import walk_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from torch import Tensor

from megatrain.distributed.alone import ALONE, Alone
from megatrain.distributed.join import first_line, unmet, unreached
from megatrain.distributed.meeting import (
    Comer,
    Met,
    backend_of,
    problem_of,
    refuse,
    share_cores,
    this_process,
)
from megatrain.distributed.network import name_interface_alone
from megatrain.distributed.processes import tell_launcher
from megatrain.distributed.ranks import Ranks
from megatrain.distributed.signals import ignore_sigterm_once
from megatrain.errors import ConfigError, MegatrainError
from megatrain.train.ranks import gathers_weights

if TYPE_CHECKING:
    from transformers import TrainingArguments

_joined: list[Ranks] = []
"""The ranks of this process, once a trainer was made, since a process joins others only once."""


def join(args: TrainingArguments) -> Ranks | Alone:
    """Join the processes that a launcher has started, and make accelerate believe that each of them is alone.

    Args:
        args: The arguments of a trainer, which have told accelerate of the processes.

    Returns:
        The ranks, or `Alone`.

    Raises:
        ConfigError: The number of ranks is no power of two, or there are too few accelerators for them.
    """
    if not _joined and args.world_size > 1:
        _joined.append(_join(args))
    if not _joined:
        return ALONE
    ranks = _joined[0]
    state: Any = PartialState()  # every object of this class shares the values that are set here
    state.distributed_type = DistributedType.NO
    state.num_processes = 1
    state.process_index, state.local_process_index = ranks.rank, ranks.local_rank
    state.wait_for_everyone = lambda: ranks.meet("orders")
    return ranks


def own_state() -> PartialState:
    """Return accelerate's state as an object that can be saved with the arguments of a trainer."""
    state = copy.copy(PartialState())  # copies do not share their values
    vars(state).pop("wait_for_everyone")
    return state


@contextmanager
def working_alone() -> Iterator[None]:
    """Let code of other libraries wait for nobody, while the other ranks wait for its results."""
    state: Any = PartialState()
    held, state.wait_for_everyone = state.wait_for_everyone, lambda: None
    try:
        yield
    finally:
        state.wait_for_everyone = held


def _join(args: TrainingArguments) -> Ranks:
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    kind = args.device.type
    backend = None if kind == "cpu" else backend_of(kind)
    store = dist.distributed_c10d._get_default_store()
    ranks = Ranks(store, float(args.ddp_timeout), local_size=local_size, backend=backend)
    comers = [Comer(**one) for one in ranks.gather_values(asdict(this_process(kind, None)))]
    refuse(problem_of(comers, local_size), ranks.local_rank)
    first = ranks.rank - ranks.local_rank
    share_cores(Met(local=comers[first : first + local_size], local_rank=ranks.local_rank))
    ranks.gathers = gathers_weights(None, kind, ranks)
    if ranks.rank > 0:
        logging.getLogger("megatrain").setLevel(logging.ERROR)
    atexit.register(ranks.leave)
    ignore_sigterm_once(lambda: ranks.watch.is_lost)
    return ranks


def _prepare(environment: MutableMapping[str, str]) -> None:
    """Prepare the meeting of the processes, which accelerate arranges when a trainer's arguments are made."""
    if int(environment.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in environment:
        name_interface_alone(environment)
        sys.excepthook = partial(_end, sys.excepthook)


def _end(
    show: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Tell the other ranks how this process ends, and report once why all do, in a sentence for our errors.

    Raises:
        SystemExit: Python then ends with the exit code.
    """
    for ranks in _joined:
        ranks.leave(error)
    if not _joined and isinstance(error, RuntimeError) and _is_of_joining(trace):
        met = not isinstance(error, dist.DistError)
        reason = first_line(error)
        error = ConfigError(
            unreached(os.environ, reason) if met else unmet(os.environ, reason, "their ddp_timeout")
        )
    if not isinstance(error, MegatrainError):
        show(kind, error, trace)
        return
    if os.environ.get("MEGATRAIN_DEBUG"):
        show(kind, error, trace)
    elif not error.is_told:
        sys.stderr.write(f"error: {error}\n")
    tell_launcher(str(error))
    raise SystemExit(error.exit_code)


def _is_of_joining(trace: TracebackType | None) -> bool:
    """Return whether an error was raised while torch let processes meet."""
    return any(frame.f_code.co_name == dist.init_process_group.__name__ for frame, _ in walk_tb(trace))


_prepare(os.environ)


class ReadBatches:
    """A digest of the batches that this rank has read, which must equal every rank's."""

    def __init__(self, ranks: Ranks | Alone, batches: Sequence[Any] = ()) -> None:
        """Begin with these batches."""
        self._ranks = ranks
        self._number = 0
        self._digest = hashlib.blake2b(digest_size=16)
        for batch in batches:
            self.add(batch)

    def add(self, batch: Any) -> None:
        """Add one more batch."""
        self._number += 1
        for part in _parts(batch):
            self._digest.update(part)

    def require_same(self, step: int, num_steps: int) -> None:
        """Refuse to continue with ranks that have read other batches.

        Args:
            step: The step for which, or after which, the batches are read; waits for it take any time.
            num_steps: The number of steps of the whole training; 0 outside of training.

        Raises:
            ConfigError: A rank has read other batches; every rank raises it.
        """
        mine = {"step": step, "steps": num_steps, "batches": [self._number, self._digest.hexdigest()]}
        first, *others = self._ranks.gather_values(mine, "orders")
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise ConfigError(
                    f"rank {rank} {_difference(first, other)} than rank 0 at step {step}: every rank reads "
                    "all data, in one order, and does all that others do; give all the same data set, seeds "
                    "and collator, shuffle by a fixed seed, and call methods of the trainer on all of them"
                )


def _difference(first: Any, other: Any) -> str:
    """Describe what a rank does differently; one that is elsewhere in the script has sent something else."""
    if not all(isinstance(said, dict) and "batches" in said for said in (first, other)):
        return "does something else"
    if other["step"] != first["step"]:
        return "is at another step"
    if other["steps"] != first["steps"]:
        return f"would take {other['steps']} steps, in place of {first['steps']}, and has other data"
    return "has read other batches"


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the bytes of a batch's contents."""
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for name in value:
            yield str(name).encode()
            yield from _parts(value[name])
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_parts, value))
    elif isinstance(value, (str, bytes, int, float, type(None))):
        yield repr(value).encode()
