"""A step for which the device had no room runs again in smaller rounds, to the same bits.

Fewer micro-batches then pass the layers together, which no bit depends on (`memory.lockstep`). A micro-batch
is never cut: that would round otherwise. The run keeps to the smaller rounds. Of several ranks, all give up
the step for which one has no room (`StepMeeting`), and go on in the same rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatrain.config.choice import Choice, Updates
from megatrain.errors import GivenUpError, MegatrainError, exhausted_memory, first_line
from megatrain.hardware.accelerators import give_back_memory
from megatrain.plan.search.planner import plan_of
from megatrain.train.out_of_memory import let_go
from megatrain.train.run import Run

_log = logging.getLogger(__name__)


def forward_backward(
    run: Run, micro_batches: Sequence[Mapping[str, Any]], seeds: Sequence[int]
) -> tuple[Tensor, dict[str, float]]:
    """Run a step up to its update, as `Run.forward_backward`, and once more if the device had no room."""
    try:
        return run.forward_backward(micro_batches, seeds)
    except Exception as error:
        lost = error if isinstance(error, GivenUpError) else None  # which all ranks have
        own: BaseException = error
        if lost is not None and error.__cause__ is not None and exhausted_memory(error.__cause__):
            own = error.__cause__
        is_alone = run.ranks.size == 1 and exhausted_memory(error) == "device"
        smaller = _smaller(run, len(micro_batches)) if lost is not None or is_alone else None
        if lost is not None:
            wishes = run.ranks.gather_values(smaller is not None)
            smaller = smaller if all(wishes) else None
        if smaller is None:
            raise own from None
        reason, where = first_line(error), "the device"
        if lost is not None:
            reason, where = lost.reason, f"the device of rank {lost.rank}"
        let_go(error)
        before = run.engine.choice.lockstep
        try:
            _rearrange(run, smaller)
        except MegatrainError:
            raise own from None
    if run.ranks.rank == 0:
        text = (
            f"{where} had no room for step {run.step + 1} ({reason}), so it runs again, with "
            f"{smaller.lockstep} of its micro-batches together in place of {before}; no bit changes, and the "
            "run goes on so"
        )
        _log.warning("%s", text)
        run.tell("replan", reason=text)
    return run.forward_backward(micro_batches, seeds)


def _smaller(run: Run, num_micro_batches: int) -> Choice | None:
    """Return the choice with rounds of half the size; None: there is none, or the state is not whole.

    Args:
        run: The run.
        num_micro_batches: The number of micro-batches of a step, of all ranks.
    """
    engine, choice = run.engine, run.engine.choice
    integrity = engine.arrangement.integrity
    together = min(choice.lockstep, len(engine.parts(num_micro_batches)[run.ranks.rank]))
    if together < 2 or choice.updates == Updates.IMMEDIATE.value:
        return None
    if integrity.cause is not None or integrity.num_held != integrity.num_issued:
        return None
    smaller = replace(choice, lockstep=-(-together // 2))
    if run.planned is not None and not plan_of(run.planned.request, smaller).fits:
        return None  # sums of several rounds take host memory too
    return smaller


def _rearrange(run: Run, choice: Choice) -> None:
    """Go on with a choice, and forget what the step has left.

    Raises:
        MegatrainError: The engine cannot change to it.
    """
    engine = run.engine
    if engine.lanes.device.type != "cpu":
        give_back_memory(engine.lanes.device)
    engine.reconfigure(choice)
    run.experts.drop()
    run.elastic, run.is_checked = None, True  # the plan is left: nobody goes back to it
