"""Random programs over shared buffers, in which any change of order changes the numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes import Lanes

NUM_BUFFERS = 5

HOST_LANES = (Lane.CALLER, Lane.HOST, Lane.READ, Lane.PAGE, Lane.WRITE, Lane.STOW, Lane.RECALL, Lane.SPREAD)
"""Lanes that are threads of the host on every device: their functions do the work themselves."""

Launch = Callable[[Callable[[], None]], None]
"""How a lane function does its work: at once, or by launching it into the lane's stream."""


def run_at_once(work: Callable[[], None]) -> None:
    """Do the work in the lane function itself."""
    work()


def run_program(lanes: Lanes, seed: int, *, num_operations: int = 30, launch: Launch = run_at_once) -> Tensor:
    """Run one random program, and return all buffers and everything that was read."""
    chance = random.Random(seed)
    buffers = [torch.full((4,), index, dtype=torch.int64) for index in range(NUM_BUFFERS)]
    seen = torch.zeros(num_operations, dtype=torch.int64)

    def operation(number: int, reads: list[int], writes: list[int]) -> Callable[[], None]:
        def work() -> None:
            total = sum(int(buffers[index].sum()) for index in reads)
            seen[number] = total
            for index in writes:
                buffers[index].mul_(31).add_(total + number).remainder_(1_000_003)

        return work

    for number in range(num_operations):
        lane = chance.choice(list(Lane))
        order = chance.sample(range(NUM_BUFFERS), 3)
        reads, writes = order[: chance.randrange(3)], order[2 : 2 + chance.randrange(2)]
        names: dict[str, Any] = {
            "reads": [("buffer", index) for index in reads],
            "writes": [("buffer", index) for index in writes],
        }
        work = operation(number, reads, writes)
        is_direct = lane is Lane.CALLER or (lane is Lane.COMPUTE and chance.random() < 0.5)
        does = work if lane in HOST_LANES else partial(launch, work)
        if is_direct:
            lanes.begin(lane, **names, label=f"op{number}")
            does()
            lanes.end(lane, **names)
        else:
            lanes.enqueue(lane, does, **names, label=f"op{number}")
    lanes.drain()
    return torch.cat([*buffers, seen])
