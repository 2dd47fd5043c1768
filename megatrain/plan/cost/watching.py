"""How much of the state in RAM a run watches for values that change by themselves, and what that takes.

`stream.execute.memory_watch` does it: of the state that the host updates, each part is watched for one step
of a rotation, and as much of the frozen weights is compared in each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.config.plan import Plan
from megatrain.layout.block_bytes import BlockBytes
from megatrain.plan.cost.step_time import Step

STEP_SHARE = 0.01
"""The part of a step's time that watching may take, if nobody has chosen."""

OPEN_ROTATION = 100
"""The rotation of a run without a plan."""

HASHED = 1.9
"""The seconds of hashing a part of the state twice, by itself, over those of its update: measured on two
cores, 0.9 for all parts at once, 1.4 for every eighth and 1.9 for every thirty-second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """What is watched of a rank's state in RAM."""

    rotation: int | None
    """The number of steps in which each part is watched for one; None: nothing is watched."""
    state_bytes: int
    """Bytes of state that is watched in turn."""
    frozen_bytes: int
    """Bytes of frozen weights, all of which are compared in one rotation."""
    unwatched_bytes: int
    """Bytes of state that is on the device or drives, where updates of it run or begin."""
    seconds: float
    """Seconds of work of a step."""

    @property
    def share(self) -> float:
        """Return the share of the first bytes that is watched at any moment."""
        return 0.0 if self.rotation is None else 1 / self.rotation


def rotation_of(wish: float | str, whole_s: float, step_s: float) -> int | None:
    """Return the number of steps in which each part of the state is watched for one; None: never.

    Args:
        wish: `off`, `auto`, or the share of the state that is watched at any moment.
        whole_s: The seconds of watching all of it in a step.
        step_s: The seconds of a step.
    """
    if wish == "off":
        return None
    if isinstance(wish, str):
        return max(1, math.ceil(whole_s / (STEP_SHARE * step_s)))
    return max(1, round(1 / wish))


def watching(plan: Plan, step: Step, wish: float | str) -> Watching:
    """Say what a planned run watches.

    Args:
        plan: The plan.
        step: Its step.
        wish: The setting `memory.watch`, as in `rotation_of`.
    """
    choice, batch, rates, sums = step.choice, step.batch, step.rates, step.block_sums
    on_host = set(sums.residency(choice).on_host)
    state = frozen = elsewhere = 0
    for number, block in enumerate(sums.blocks):
        own = _state_bytes(block.sizes, step) // batch.num_ranks
        if number in on_host and not sums.is_state_on_drives(choice, number):
            state += own
        else:
            elsewhere += own
        if not sums.is_working_on_drives(choice, number):
            frozen += (block.sizes.kept_bytes - block.sizes.gradient_bytes) // batch.ranks_of_node
    whole_s = HASHED * rates.update_s(2 * state) + rates.host_pass_s(frozen)
    rotation = rotation_of(wish, whole_s, plan.step_s)
    return Watching(
        rotation=rotation,
        state_bytes=state,
        frozen_bytes=frozen,
        unwatched_bytes=elsewhere,
        seconds=0.0 if rotation is None else whole_s / rotation,
    )


def _state_bytes(sizes: BlockBytes, step: Step) -> int:
    """Return the bytes of masters and the optimizer's planes."""
    return 4 * sizes.num_state + sizes.optimizer_bytes(step.rates.optimizer)
