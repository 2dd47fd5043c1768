"""The program of the visits to come. Most steps are like the one before: their program is made once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from megatrain.plan.program.features.roles import BlockPass, SumTaken
from megatrain.plan.program.operations import Operation
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import visits_program
from megatrain.plan.program.visits import Visit


class Foresight:
    """Makes programs, and keeps what is left of the newest."""

    def __init__(self) -> None:
        """Foresee nothing."""
        self._known: tuple[StepSpec, Sequence[Visit], Any, tuple[Operation, ...]] | None = None
        self._ends: dict[str, tuple[StepSpec, tuple[Any, ...], list[Operation]]] = {}
        self._pending: deque[Operation] = deque()
        self.next: BlockPass | None = None
        """The visit that comes next, once `before_visit` is through; None: no visit does."""

    def foresee(
        self, spec: StepSpec, visits: Sequence[Visit], contents: Sequence[int | None], **begin: Any
    ) -> None:
        """Go on with the program of `visits_program`, whose arguments these are.

        The newest is found again for the same objects `spec` and `visits`, which nobody may change.
        """
        asked = [*contents], begin
        known = self._known
        if known is None or known[0] is not spec or known[1] is not visits or known[2] != asked:
            operations = visits_program(spec, visits, contents, **begin).operations
            known = self._known = spec, visits, asked, operations
        self._pending = deque(known[3])
        self._look()

    def forget(self) -> None:
        """Foresee nothing from now on."""
        self._pending.clear()
        self.next = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is foreseen."""
        return not self._pending

    def end(self, make: Callable[..., list[Operation]], spec: StepSpec, *asked: Any) -> list[Operation]:
        """Return what `make` lists of what comes after all visits, the newest again if it is asked the same.

        Nobody may change the list, `spec`, or what is asked.
        """
        known = self._ends.get(make.__name__)
        if known is None or known[0] is not spec or known[1] != asked:
            known = self._ends[make.__name__] = spec, asked, make(spec, *asked)
        return known[2]

    def _look(self) -> None:
        is_visit = bool(self._pending) and self._pending[0].is_visit
        self.next = cast(BlockPass, self._pending[0]) if is_visit else None

    @property
    def gathers(self) -> bool:
        """Whether ranks are to gather weights."""
        return any(operation.gathers for operation in self._pending)

    def take(self) -> Operation:
        """Return what comes next, which is done then."""
        operation, pending = self._pending.popleft(), self._pending
        self.next = cast(BlockPass, pending[0]) if pending and pending[0].is_visit else None
        return operation

    def left_together(self) -> list[Operation]:
        """Take all that is left; return what of it ranks do together, with what brings the weights for it."""
        gathers, pending = self.gathers, list(self._pending)
        self.forget()
        return [each for each in pending if each.meets or (gathers and each.brings_weights)]

    def before_visit(self, outer: Collection[int], *, ends_round: bool = False) -> list[Operation]:
        """Take what comes before the next visit of a layer, but for work on `outer` blocks.

        What comes after all of a round's backward waits until the round ends.
        """
        pending, taken = self._pending, []
        while pending:
            operation = pending[0]
            if operation.is_visit and operation.block not in outer:
                break
            if operation.ends_round and operation.block in outer and not ends_round:
                break
            pending.popleft()
            if not operation.is_compute:
                taken.append(operation)
        self._look()
        return taken

    def drop_ends(self, block: int) -> None:
        """Leave out what follows a block's last backward, which brought no gradient."""
        while self._pending and self._pending[0].ends_gradient:
            assert self._pending.popleft().block == block
        self._look()

    def drop_copies(self, is_filled: Sequence[bool]) -> list[SumTaken]:
        """Forget the program; return what of it takes sums from the gradient buffers that are filled."""
        taken = [cast(SumTaken, operation) for operation in self._pending if operation.takes_sum]
        copies = [operation for operation in taken if is_filled[operation.gradient_buffer]]
        self.forget()
        return copies
