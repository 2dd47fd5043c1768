"""The programs of visits to come. Most steps are like the one before, and their program is made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatrain.plan.program.operations import Operation
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import visits_program
from megatrain.plan.program.visits import Visit


class Foresight:
    """Makes programs, and keeps the newest."""

    def __init__(self) -> None:
        """Know of none."""
        self._known: tuple[StepSpec, Sequence[Visit], Any, tuple[Operation, ...]] | None = None

    def operations(
        self, spec: StepSpec, visits: Sequence[Visit], contents: Sequence[int | None], **begin: Any
    ) -> tuple[Operation, ...]:
        """Return the operations of `visits_program`, whose arguments these are.

        The newest are found again for the same objects `spec` and `visits`, which nobody may change.
        """
        asked = [*contents], begin
        if self._known is not None:
            known_spec, known_visits, known, operations = self._known
            if known_spec is spec and known_visits is visits and known == asked:
                return operations
        program = visits_program(spec, visits, contents, **begin)
        self._known = spec, visits, asked, program.operations
        return program.operations
