"""Lets somebody read the state while training goes on: a change of a block waits until it has been read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatrain.plan.program.operations import Work


class StateGuard:
    """Stands before each change of a block's state in host memory. The launching thread calls it."""

    def __init__(self) -> None:
        """Let all changes pass."""
        self._wait: Callable[[int], object] | None = None
        self._order: dict[int, None] = {}

    @property
    def order(self) -> list[int]:
        """The blocks in the order in which the last step changed them, while somebody held them."""
        return list(self._order)

    def hold(self, wait: Callable[[int], object] | None) -> None:
        """Call a function with a block's number before each change of it, in the lane that changes it.

        Args:
            wait: The function, which returns once the block may change; None: all may.
        """
        self._wait = wait

    def before(self, block: int, work: Work) -> Work:
        """Return a change of a block, which waits first."""
        if self._wait is None:
            return work
        self._order.pop(block, None)
        self._order[block] = None
        wait = self._wait

        def run() -> None:
            wait(block)
            work()

        return run

    def wait_for(self, blocks: Iterable[int]) -> None:
        """Wait until some blocks may change."""
        if self._wait is not None:
            for block in blocks:
                self._wait(block)
