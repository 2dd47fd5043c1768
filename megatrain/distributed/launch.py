"""Processes that train together, started by PyTorch's elastic launcher, that of torchrun.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from uuid import uuid4

from megatrain.distributed.processes import how_ended, status_of
from megatrain.distributed.signals import WARNINGS, stop_signals
from megatrain.errors import RankError, TornStateError

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
    def first_code(self) -> int:
        """What the run has ended with, as far as another start goes; negative: the signal of a kill."""
        if self.own_code is not None:
            return self.own_code
        return next((code for code in self.codes.values() if code < 0), self.exit_code)

    @property
    def exit_code(self) -> int:
        """The exit code of the command: that of the first rank that has one of its own."""
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
    restarts: Callable[[int], bool] = lambda code: False,
) -> int:
    """Run `megatrain` with these arguments once per rank, and return one exit code.

    Where a rank was killed, stopped or hung, the same run goes on from its newest checkpoint, to the same
    bits, with the largest number of ranks that is left and shares out the step's runs; or with as many as
    before, where `restarts` wants that. The first signal of `stop_signals` lets the ranks finish their step
    and save, or ends them if they do not train yet; a second one ends them at once. After either nothing
    goes on.

    Args:
        num_ranks: The number of ranks: a power of two.
        arguments: The arguments of the command line, without the number of ranks.
        least: So many take part in every micro-batch: fewer cannot run.
        again: The function that returns the arguments with which the run goes on.
        tell: The function that is told how ranks have ended, and how many go on: 0, if none do.
        restarts: The function that is asked whether all are started again, with `Ended.first_code`.
    """
    with _stopping() as stop:
        while True:
            ended = replace(_launch(num_ranks, arguments, stop), signal=stop.number)
            if not ended.codes:
                return 0
            goes_on = ended.signal is None and restarts(ended.first_code)
            if not goes_on:
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
        if self.number is not None and number not in WARNINGS:
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
