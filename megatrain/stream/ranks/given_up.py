"""A step for which the device of one rank has no room is given up by all ranks, which go on together.

Nothing can leave an exchange in the middle: Gloo and NCCL wait in it for every rank. So the rank that has no
room goes through what is left of the step that ranks do together, which the program of the step lists, and
computes nothing for it. The others learn of it, and do the same from their next visit of a layer on, or come
to the end of the passes in vain. There all meet, and nobody has changed anything of the state.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatrain.errors import GivenUpError, RankError, exhausted_memory, first_line
from megatrain.stream.job.ranks import Ranks


class GivenUp(RankError):
    """Ends the visits of a step that another rank has given up; `StepMeeting` puts its own error there."""

    def __init__(self) -> None:
        """Say what is left to say where this rank cannot go through the step."""
        super().__init__(
            "another rank has given up the step, since its device has no room for it, and this rank cannot "
            "do so in the same order"
        )


class Going(Protocol):
    """What goes through a step: an `Executor`."""

    @property
    def can_go_through(self) -> bool:
        """Whether it can."""

    def go_through(self) -> None:
        """Do what is left of the step that ranks do together."""


class StepMeeting:
    """Where all ranks meet after the passes of a step, whether or not they have got through them."""

    def __init__(self, ranks: Ranks, sequence: int) -> None:
        """Prepare the meeting of ranks, of which each `sequence` neighbours share out rows.

        Those swap tokens inside attention, which no program lists, so they cannot go through a step.
        """
        self._ranks, self._can_be_held = ranks, ranks.size > 1 and sequence == 1
        self._is_ahead = False

    def begin(self) -> None:
        """Take note that the passes of a step begin, of which all ranks know."""
        if self._can_be_held:
            self._is_ahead = True
            self._ranks.begin_step()

    def come(self) -> None:
        """Meet the others after all passes.

        Raises:
            GivenUpError: Another rank has given up the step.
        """
        if self._is_ahead and (lost := self._meet("")) is not None:
            raise lost

    def come_early(self, error: BaseException, going: Going) -> GivenUpError | None:
        """Meet the others after an error that has ended the passes of this rank.

        Args:
            error: The error.
            going: What goes through the rest of the step.

        Returns:
            What to raise in the error's place, on every rank; None: the error is no reason to give up the
            step together, or nobody can.
        """
        if not self._is_ahead:
            return None
        try:
            has_no_room = exhausted_memory(error) == "device"
            if not (going.can_go_through and (has_no_room or isinstance(error, GivenUp))):
                return None
            if has_no_room:
                self._ranks.give_up()
            going.go_through()
            return self._meet(first_line(error) if has_no_room else "")
        finally:
            self._end()

    def _end(self) -> None:
        self._is_ahead = False
        self._ranks.end_step()

    def _meet(self, reason: str) -> GivenUpError | None:
        self._end()
        if not torch.stack(self._ranks.gather(torch.tensor([int(bool(reason))]))).any():
            return None
        reasons = self._ranks.gather_values(reason)
        rank = next(rank for rank, found in enumerate(reasons) if found)
        lost = GivenUpError(rank, reasons[rank])
        is_here = rank // self._ranks.local_size == self._ranks.node
        says = rank == self._ranks.rank if is_here else self._ranks.local_rank == 0  # once on each machine
        lost.is_told = not says
        return lost
