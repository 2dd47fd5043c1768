"""Where copies of saved activations are placed: out after a forward, back one visit before their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.plan.program.kinds import Kind
from megatrain.plan.program.operations import Operation
from megatrain.plan.program.visits import Visit


class Saving:
    """The copies of saved activations: out after a forward, back one visit before they are needed."""

    def __init__(self, visits: Sequence[Visit], nbytes: Mapping[int, int]) -> None:
        """Place the copies of these visits; `nbytes`: by block, what a micro-batch saves, if it is known."""
        self._visits = visits
        self._nbytes = nbytes
        self._restores = deque(n for n, visit in enumerate(visits) if visit.restores >= 0)
        self._restored = -1
        self._numbers: dict[tuple[int, int], int] = {}
        """By block and micro-batch: the number of what it has saved and not restored yet."""
        self._num_saved = 0
        self._arrivals: dict[int, int] = {}
        """By position of a visit: where on the device its activations arrive."""

    def forward(self, visit: Visit, slot: int, arrival: int) -> list[Operation]:
        """List a forward, and the copy of what it saves; `arrival` is where its boundary has come back."""
        both: dict[str, Any] = {"block": visit.block, "micro_batch": visit.micro_batch}
        both["is_head"] = visit.is_head
        both["num_micro_batches"] = visit.num_micro_batches
        if not visit.saves:
            return [Operation(kind=Kind.FORWARD, slot=slot, arrival=arrival, **both)]
        both["saved"] = self._numbers[visit.block, visit.micro_batch] = self._num_saved
        self._num_saved += 1
        nbytes = self._nbytes.get(visit.block, 0) * visit.num_micro_batches
        return [
            Operation(kind=Kind.FORWARD, slot=slot, **both),
            Operation(kind=Kind.SAVE, nbytes=nbytes, **both),
        ]

    def restores_before(self, position: int) -> list[Operation]:
        """List the copies back to begin before the visit at `position`: its own, and the next one."""
        made = []
        while self._restores and (self._restores[0] <= position or self._restored <= position):
            visit = self._visits[self._restores[0]]
            number = self._numbers.pop((visit.restores, visit.micro_batch), -1)
            if number < 0:  # of a later round, whose forward comes first
                break
            self._restored = self._restores.popleft()
            count = visit.num_micro_batches
            if number == self._num_saved - 1:
                count -= 1  # the newest is still on the device: its memory is freed when the next one leaves
            if not count:
                continue
            self._arrivals[self._restored] = len(self._arrivals) % 2
            made.append(
                Operation(
                    kind=Kind.RESTORE,
                    block=visit.restores,
                    micro_batch=visit.micro_batch,
                    num_micro_batches=visit.num_micro_batches,
                    saved=number,
                    arrival=self._arrivals[self._restored],
                    nbytes=self._nbytes.get(visit.restores, 0) * count,
                )
            )
        return made

    def arrival_of(self, position: int) -> int:
        """Return where what a visit needs has arrived; -1: nothing has."""
        return self._arrivals.get(position, -1)
