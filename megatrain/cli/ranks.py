"""The options `--ranks` and `--restarts` of `megatrain train`, and torchrun's variables."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)


def leave_out_stacks() -> None:
    """Stop torch's C++ from printing the stack of every read from a rank or launcher that has ended.

    It must be called before torch is imported; values that the user has set stay.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def start_ranks(
    config: Config, ranks: int, arguments: Sequence[str], *, dry_run: bool, restarts: int = 0
) -> int:
    """Run the same command once per rank, and return the exit code of all.

    Args:
        config: The settings of the arguments.
        ranks: The number of ranks.
        arguments: The arguments of the command line, without the number of ranks.
        dry_run: Whether the command only tries the run out.
        restarts: The number of times that all ranks are started again, at most, before fewer go on.

    Raises:
        ConfigError: This machine cannot run so many ranks, or the number of restarts is negative.
        MegatrainError: `check_start` raises it.
    """
    leave_out_stacks()
    from megatrain.checkpoint.load import find
    from megatrain.config import replace_settings
    from megatrain.config.runs import num_places, require_power_of_two
    from megatrain.distributed.launch import Ended, run_ranks
    from megatrain.hardware.accelerators import check_count
    from megatrain.hardware.cores import allowed_cpus
    from megatrain.train.commands.restarts import Restarts
    from megatrain.train.records.directory import RunDirectory
    from megatrain.train.records.events import record_ranks
    from megatrain.train.report.page import leave_report
    from megatrain.train.resume_point import check_start

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--ranks starts processes, and torchrun has started this one as one of "
            f"{os.environ['WORLD_SIZE']} (WORLD_SIZE); leave --ranks away"
        )
    if dry_run:
        raise ConfigError("--dry-run tries out one rank; leave --ranks away")
    _require_count(restarts)
    require_power_of_two(ranks, f"--ranks is {ranks}")
    kind = check_count(config.train.device, ranks)
    sequence = config.parallel.sequence
    shards = config.parallel.shards or num_places(ranks, sequence)
    check_start(config, ranks)
    if kind is None and ranks > (cores := len(allowed_cpus())):
        _log.warning("%d ranks take turns on %d cores; more than one for each is slower", ranks, cores)
    directory = RunDirectory(Path(config.out))

    def again() -> list[str]:
        if next(iter(find(directory.checkpoints)), None) is not None:
            return replace_settings(arguments, {"checkpoint.resume": "auto"})
        if config.checkpoint.resume not in ("auto", "no"):
            return list(arguments)
        return replace_settings(arguments, {"checkpoint.resume": "auto", "parallel.shards": str(shards)})

    def tell(ended: Ended, num_left: int) -> None:
        if ended.signal is not None:
            if ended.own_code is None:
                name = signal.Signals(ended.signal).name
                _log.warning("ended by %s; the same command goes on from the newest checkpoint, if any", name)
            return
        reason = ended.reason
        if reason is not None:
            how = "the same command goes on" if not num_left else f"going on with {num_left} ranks"
            _log.warning("%s; %s from the newest checkpoint", reason.partition(". ")[0], how)
        record_ranks(directory, ended.codes, ended.sentences, num_left)
        if not num_left and config.log.report and directory.is_run:
            leave_report(directory)  # a report by the first rank does not know how it ended

    restarting = {"restarts": Restarts(directory, restarts).wants} if restarts else {}
    return run_ranks(ranks, arguments, least=sequence, again=again, tell=tell, **restarting)


def start_again(config: Config, arguments: Sequence[str], restarts: int, others: Mapping[str, bool]) -> int:
    """Run the same command in another process, and again after a crash; return its exit code.

    Args:
        config: The settings of the arguments.
        arguments: The arguments of the command line, without the number of restarts.
        restarts: The number of further starts, at most.
        others: The options that do not go with it, and whether they are given.

    Raises:
        ConfigError: There is such an option, a launcher has started this process, or the number is negative.
    """
    from megatrain.checkpoint.load import find
    from megatrain.config import replace_settings
    from megatrain.train.commands.restarts import command_of, run_again
    from megatrain.train.records.directory import RunDirectory

    _require_count(restarts)
    if excluded := [name for name, is_given in others.items() if is_given]:
        raise ConfigError(
            f"--restarts starts a run again and does not go with {excluded[0]}; leave one of them away"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--restarts starts processes itself; torchrun has --max-restarts of its own")
    directory = RunDirectory(Path(config.out))
    is_first = True

    def command() -> list[str]:
        nonlocal is_first
        goes_on = config.checkpoint.resume in ("auto", "no") or any(find(directory.checkpoints))
        if is_first or not goes_on:
            is_first = False
            return command_of(arguments)
        return command_of(replace_settings(arguments, {"checkpoint.resume": "auto"}))

    return run_again(command, directory, restarts=restarts)


def _require_count(restarts: int) -> None:
    if restarts < 0:
        raise ConfigError(f"--restarts is {restarts}; give 0 or more")


def join_ranks(config: Config, progress: Callable[[str], object]) -> Ranks | Alone:
    """Join the ranks that this process was started with, and let the first one speak for all.

    Args:
        config: The settings of the run.
        progress: The progress object, which has reported the present work so far.

    Raises:
        ConfigError: `join` raises it.
    """
    from megatrain.distributed.join import join

    shards, sequence = config.parallel.shards, config.parallel.sequence
    most = None if shards is None else shards * sequence
    device = config.train.device
    joined = join(os.environ, config.parallel.timeout, most, _log.warning, device=device)
    if joined.rank > 0:
        logging.disable(logging.WARNING)
        progress("")
    return joined
