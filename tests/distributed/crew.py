"""Ranks that stay for task after task: of a product of settings, no row waits for processes to start."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatrain.errors import MegatrainError
from tests.distributed.processes import joined

_TIMEOUT_S = 300.0
_IMPORTED = ["tests.distributed.training", "tests.distributed.runs", "peft", "datasets", "tests.prepared"]


class Crew:
    """Real processes on Gloo, forks of one that has imported everything."""

    def __init__(self, place: Path, size: int, num_nodes: int = 1, timeout_s: float = _TIMEOUT_S) -> None:
        """Start them.

        Args:
            place: Directory of this crew alone, which is made.
            size: Number of ranks; the only one of a crew of one trains as if there were none.
            num_nodes: Number of nodes on which they believe to be.
            timeout_s: How long one may be silent, or keep others waiting.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        place.mkdir()
        self._pipes: list[Connection] = []
        self._processes = []
        self._is_ordered = False
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, num_nodes, timeout_s, str(place / "store"))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def order(self, task: Callable[..., Any], **settings: Any) -> None:
        """Let every rank begin with `task(ranks, **settings)`."""
        self._is_ordered = True
        for pipe in self._pipes:
            pipe.send((task, settings))

    def answers(self) -> list[Any]:
        """Wait for what each rank's task returns.

        Raises:
            AssertionError: A rank has failed; all have ended.
        """
        found: dict[Connection, Any] = {}
        while waiting := [pipe for pipe in self._pipes if pipe not in found]:
            for pipe in wait(waiting):
                assert isinstance(pipe, Connection)
                try:
                    found[pipe], error = pipe.recv()
                except EOFError:
                    error = "a rank has ended without a word"
                if error:
                    self.close()
                    raise AssertionError(error)
        self._is_ordered = False
        return [found[pipe] for pipe in self._pipes]

    def run(self, task: Callable[..., Any], **settings: Any) -> list[Any]:
        """Order a task, and wait for the answers."""
        self.order(task, **settings)
        return self.answers()

    def codes(self) -> list[int | None]:
        """Wait until all have ended by themselves, and return their exit codes."""
        for process in self._processes:
            process.join()
        return [process.exitcode for process in self._processes]

    @property
    def is_ready(self) -> bool:
        """All are there, and wait for an order."""
        return not self._is_ordered and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, size: int, num_nodes: int, timeout_s: float, store: str) -> None:
    """Be a rank, and do what is ordered until somebody fails or the crew is closed."""
    with joined(rank, size, store, num_nodes=num_nodes, timeout_s=timeout_s) as ranks:
        while True:
            task, settings = pipe.recv()
            try:
                pipe.send((task(ranks, **settings), ""))
            except BaseException as error:
                pipe.send((None, traceback.format_exc()))
                if isinstance(error, MegatrainError):
                    sys.exit(error.exit_code)
                raise
